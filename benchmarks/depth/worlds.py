"""Synthetic scenes for depth from features.

Smooth depth with jumps, seen through features that look alike at several depths.
"""

import dataclasses

import numpy as np

#: Features repeat after this depth, so that one of them alone fits several depths.
PERIOD = 0.35
DIMENSION = 8
NOISE = 0.25


@dataclasses.dataclass(frozen=True)
class World:
    """One scene: log depth `[rows, columns]` and features `[rows, columns, DIMENSION]`."""

    depth: np.ndarray
    features: np.ndarray


def _smooth(noise: np.ndarray, width: float) -> np.ndarray:
    """Gaussian smoothing by Fourier transform, to variance 1."""
    frequencies = [np.fft.fftfreq(size) for size in noise.shape]
    squares = frequencies[0][:, None] ** 2 + frequencies[1][None, :] ** 2
    field = np.real(np.fft.ifft2(np.fft.fft2(noise) * np.exp(-2 * (np.pi * width) ** 2 * squares)))
    return field / field.std()


def depth_map(rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """A ground that recedes towards the top, gentle waves, and a few objects that stand in front of
    it.
    """
    margin = 8
    noise = rng.normal(size=(rows + 2 * margin, columns + 2 * margin))
    waves = _smooth(noise, 0.2 * min(rows, columns))[margin:-margin, margin:-margin]
    height = np.linspace(1, 0, rows)[:, None]
    depth = 0.25 + 0.5 * height + 0.06 * waves
    for _ in range(rng.integers(2, 5)):
        tall, wide = rng.integers(rows // 5, rows // 2), rng.integers(columns // 5, columns // 2)
        top, left = rng.integers(0, rows - tall), rng.integers(0, columns - wide)
        place = np.s_[top : top + tall, left : left + wide]
        depth[place] = (
            depth[min(top + tall, rows - 1), left] - rng.uniform(0, 0.15) + 0.02 * waves[place]
        )
    return depth


def feature_map(depth: np.ndarray, mixing: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Periodic functions of the depth and a weak trend, mixed into `DIMENSION` noisy numbers."""
    angle = 2 * np.pi * depth / PERIOD
    clean = np.stack([np.cos(angle), np.sin(angle), 0.5 * depth], -1)
    noise = NOISE * rng.normal(size=(*depth.shape, 3))
    return (clean + noise) @ mixing + 0.05 * rng.normal(size=(*depth.shape, DIMENSION))


def worlds(rows: int, columns: int, count: int, seed: int) -> list[World]:
    """Independent scenes of one camera (one mixing of features)."""
    mixing = np.random.default_rng(12345).normal(size=(3, DIMENSION)) / np.sqrt(3)
    result = []
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        depth = depth_map(rows, columns, rng)
        result.append(World(depth, feature_map(depth, mixing, rng)))
    return result
