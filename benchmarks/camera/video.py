"""What the camera experiments share.

Data, error measures, and the baselines that are not kernel filters.
"""

import pathlib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

DATA = pathlib.Path(__file__).parents[1] / "data"
SPLIT = 1800
SEGMENT = 100


class Camera(NamedTuple):
    """Frames as rows of pixels in [0, 1], with noise.

    Rotations `[T, 3, 3]`; the first `SPLIT` are for training.
    """

    frames: np.ndarray
    rotations: np.ndarray

    def part(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Rotations and frames of a stretch."""
        return self.rotations[start:stop], self.frames[start:stop]


def load(name: str, variance: float, seed: int = 0, dtype: type = np.float32) -> Camera:
    """A camera data set with Gaussian pixel noise of the given variance on all frames."""
    with np.load(DATA / f"{name}.npz") as arrays:
        clean, rotations = arrays["frames"] / 255.0, arrays["rotations"]
    noise = np.random.default_rng(seed).normal(size=clean.shape) * np.sqrt(variance)
    frames = (clean + noise).reshape(len(clean), -1)
    return Camera(frames.astype(dtype), rotations.astype(dtype))


def frobenius(estimates: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Frobenius distance of each estimate to the true rotation: 0 is right, 2.83 is half a turn."""
    return np.linalg.norm(np.asarray(estimates) - truth, axis=(1, 2))


def summary(estimates: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Mean, median and mean trace with standard errors over path segments of `SEGMENT` frames.

    Errors of neighboring frames are not independent; the means of segments nearly are.
    """
    errors = frobenius(estimates, truth)
    traces = np.einsum("tij,tij->t", np.asarray(estimates), truth)
    segments = np.arange(len(errors)) // SEGMENT

    def over_segments(values, statistic):
        parts = [statistic(values[segments == s]) for s in np.unique(segments)]
        return float(np.std(parts, ddof=1) / np.sqrt(len(parts)))

    return {
        "mean": float(errors.mean()),
        "mean_se": over_segments(errors, np.mean),
        "median": float(np.median(errors)),
        "median_se": over_segments(errors, np.median),
        "trace": float(traces.mean()),
        "trace_se": over_segments(traces, np.mean),
    }


def windows(frames: np.ndarray, length: int) -> np.ndarray:
    """Each frame with the `length - 1` before it, as one row.

    The first frame stands in for what lies before it.
    """
    index = np.maximum(np.arange(len(frames))[:, None] - np.arange(length)[None, :], 0)
    return frames[index].reshape(len(frames), -1)


def kalman(
    rotations: np.ndarray, frames: np.ndarray, test: np.ndarray, ridge_share: float = 1e-2
) -> np.ndarray:
    """Kalman filter on the nine matrix entries, all parameters by linear regression on the training
    sequence.

    State and observation are centered; transition and observation matrices by least squares;
    covariances from the residuals, that of the 1200 pixels shrunk to its diagonal by `ridge_share`.
    Estimates are projected onto SO(3).
    """
    states = rotations.reshape(len(rotations), 9).astype(float)
    s_mean, o_mean = states.mean(0), frames.mean(0).astype(float)
    s, o, t = states - s_mean, frames - o_mean, test - o_mean
    transition = np.linalg.lstsq(s[:-1], s[1:], rcond=None)[0].T
    q = np.cov((s[1:] - s[:-1] @ transition.T).T)
    observe = np.linalg.lstsq(s, o, rcond=None)[0].T
    residual = np.cov((o - s @ observe.T).T)
    r = (1 - ridge_share) * residual + ridge_share * np.diag(np.diag(residual))
    information = observe.T @ np.linalg.solve(r, observe)
    evidence = t @ np.linalg.solve(r, observe)
    means = kalman_means(transition, q, information, evidence, np.cov(s.T)) + s_mean
    return np.asarray(kbr.embedding.nearest_rotation(jnp.asarray(means.reshape(-1, 3, 3))))


def kalman_means(transition, q, information, evidence, covariance) -> np.ndarray:
    """Posterior means of a Kalman filter in information form, from a first state with mean 0 and
    the given covariance.

    `information` is C' R^{-1} C and a row of `evidence` C' R^{-1} o: 1200 pixels enter as nine
    numbers a frame.
    """
    mean, means = np.zeros(len(q)), []
    for row in evidence:
        posterior = np.linalg.inv(np.linalg.inv(covariance) + information)
        mean = posterior @ (np.linalg.solve(covariance, mean) + row)
        means.append(mean)
        mean, covariance = transition @ mean, transition @ posterior @ transition.T + q
    return np.stack(means)


def random_rotations(count: int, seed: int = 0) -> np.ndarray:
    """Uniform random rotations."""
    q, r = np.linalg.qr(np.random.default_rng(seed).normal(size=(count, 3, 3)))
    q = q * np.sign(np.einsum("tii->ti", r))[:, None, :]
    return q * np.linalg.det(q)[:, None, None]
