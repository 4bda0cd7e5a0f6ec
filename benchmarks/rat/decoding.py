r"""Where is the rat? Spikes and field potentials of its hippocampus on a circular track.

    python -m benchmarks.rat.decoding [spikes | field | both | map | rival ...]

Data: `Figure2_source_data_wake.mat` of the public repository
lcaopcn/Spatiotemporal-patterns-of-rodent-hippocampal-field-potentials-uncover-spatial-representations
(folder `Figure2_source_data`) in the folder `KBR_DATA`; it is not part of the project. 77 units and
128 channels in bins of 100 ms, those with speed above .05: 2 061 bins on a track of 290 cm, in ten
contiguous folds. A fold is filtered from the marginal, by a filter of the other nine.

`learn_filter` sees the spike counts of one bin as integers, the field's amplitudes (each bin scaled
to [0, 1], as published) of this bin and the last, or both. States are (cos, sin) of the angle; the
estimate is the angle of the belief's mean. No parameter is set by hand.

The strong peer is a Poisson state-space decoder of the counts: independent rates on 145 places,
smoothed by a von Mises kernel, and a move that is normal on the circle with jumps. Its smoothing,
its step and its share of jumps have the least mean error on the last fifth of the training bins.

`map` compares metrics of the observations (`learning.DiscriminantMap`) by ridge regression from one
bin to the position, without a filter, on every third fold. Each metric has the best of 12
bandwidths and ridges on the test folds. `rival` starts the filters of three folds at 40 bins each
on the other side of the track, and counts the bins until the error is below 30 cm.

Published errors of the same bins (linear decoders with history, variational Bayes): spikes 5.00 /
10.23, field 5.00 / 11.61 cm (median / mean).
"""

import itertools
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kbr_jax as kbr
from kbr_jax.filtering import RivalFilter
from kbr_jax.learning import _maps
from kbr_jax.learning._filter import WIDTHS
from kbr_jax.learning._folds import spread
from kbr_jax.learning._maps import CHOOSING
from kbr_jax.learning._report import BANDWIDTHS, RIDGES

from .. import experiment
from ..indoor.baselines import data_path

#: Of linear decoders with history, over all bins of the repository's stored errors.
PUBLISHED = {
    "spikes": {"median": 5.00, "mean": 10.23},
    "field": {"median": 5.00, "mean": 11.61},
}
TRACK, FOLDS, PLACES = 290.0, 10, 145
LIFETIMES, STARTS, LENGTH, NEAR = (5, 10, 20, 40), 40, 60, 30.0
SMOOTHINGS, STEPS, JUMPS = (50.0, 100.0, 200.0, 400.0), (2.0, 4.0, 8.0, 16.0), (1e-6, 1e-3)


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions in [0, 1), counts and amplitudes of the bins in which the rat moves."""
    import scipy.io

    data = scipy.io.loadmat(data_path().parent / "Figure2_source_data_wake.mat")
    moving = data["Speed"][:, 0] > 0.05
    position, field = data["Position"][moving, 0], data["FPAuhf"][moving]
    position = (position - position.min()) / np.ptp(position)
    least, most = field.min(1, keepdims=True), field.max(1, keepdims=True)
    return position, data["Spikes"][moving].astype(int), (field - least) / (most - least)


def observations(kind: str, counts: np.ndarray, field: np.ndarray) -> np.ndarray:
    """What is seen in each bin but the first. Counts stay integers where they are alone."""
    history = np.hstack([field[1:], field[:-1]])
    if kind == "spikes":
        return counts[1:]
    return history if kind == "field" else np.hstack([np.sqrt(counts[1:]), history])


def circular(estimates: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Distances along the track in cm."""
    apart = np.abs(estimates - truth) % 1
    return TRACK * np.minimum(apart, 1 - apart)


def on_circle(position: np.ndarray) -> jax.Array:
    """The states (cos, sin)."""
    angle = 2 * np.pi * position
    return jnp.asarray(np.stack([np.cos(angle), np.sin(angle)], axis=1))


def learn(position, seen, held_out: np.ndarray):
    """The learned filter and its report without one fold."""
    states = on_circle(position)
    parts = [np.arange(held_out[0]), np.arange(held_out[-1] + 1, len(position))]
    parts = [part for part in parts if len(part) > 1]
    return kbr.learn_filter(
        [states[part] for part in parts],
        [jnp.asarray(seen[part]) for part in parts],
        progress=False,
    )


def place(mean) -> np.ndarray:
    """Positions of mean states."""
    mean = np.asarray(mean)
    return np.arctan2(mean[..., 1], mean[..., 0]) / (2 * np.pi) % 1


def learned(position, seen, held_out: np.ndarray) -> dict[str, np.ndarray]:
    """Estimates of the learned filter and its smoother on one fold."""
    filt, report = learn(position, seen, held_out)
    print(report, flush=True)
    run = kbr.run_filter(filt, jnp.asarray(seen[held_out]))
    ridge = float(report.chosen["regularizer"])
    smoothed = kbr.smooth(filt, run, regularizer=ridge)
    results = {"kernel Bayes filter": kbr.state_mean(filt, run), "smoothed": kbr.mean(smoothed)}
    return {name: place(mean) for name, mean in results.items()}


def rivals(position, seen, folds: list[np.ndarray]) -> dict[str, float]:
    """Mean bins until a filter that starts wrong is back, by the rival's lifetime."""
    counts: dict[str, list[float]] = {}
    for held_out in folds[::4]:
        learned_filter, _ = learn(position, seen, held_out)
        base: Any = getattr(learned_filter, "base", learned_filter)
        residual = kbr.leave_out_loss(base.emission, kernel=base.emission.kernel_y)
        filters = {"no rival": base} | {
            f"lifetime {steps}": RivalFilter(base, residual=residual, lifetime=steps)
            for steps in LIFETIMES
        }
        starts = np.linspace(0, len(held_out) - LENGTH, STARTS).astype(int)
        windows = jnp.asarray(np.stack([seen[held_out[s : s + LENGTH]] for s in starts]))
        truth = np.stack([position[held_out[s : s + LENGTH]] for s in starts])
        wrong = on_circle(truth[:, 0] + 0.5)
        for name, filt in filters.items():
            errors = circular(place(_from_wrong(filt, windows, wrong)), truth)
            far = np.cumprod(errors > NEAR, axis=1).sum(axis=1)
            counts.setdefault(name, []).extend(far.tolist())
        print({name: float(np.mean(found)) for name, found in counts.items()}, flush=True)
    return {name: float(np.mean(found)) for name, found in counts.items()}


@eqx.filter_jit
def _from_wrong(filt, windows, wrong):
    def one(observations, state):
        kernel = getattr(filt, "base", filt).emission.kernel_x
        prior = kbr.embed(kernel, state[None])
        return kbr.state_mean(filt, kbr.run_filter(filt, observations, prior=prior))

    return jax.vmap(one)(windows, wrong)


def poisson(position, counts, tests, smoothing: float, step: float, jump: float) -> np.ndarray:
    """Estimates of the Poisson decoder: the circular mean of its belief."""
    places = (np.arange(PLACES) + 0.5) / PLACES
    near = np.exp(smoothing * (np.cos(2 * np.pi * (places[:, None] - position)) - 1))
    rates = (near @ counts + 1e-2) / (near.sum(1, keepdims=True) + 1e-2)
    apart = circular(places[:, None], places)
    move = np.exp(-(apart**2) / (2 * step**2))
    move = (1 - jump) * move / move.sum(0) + jump / PLACES
    logs = tests @ np.log(rates).T - rates.sum(1)
    belief, estimates = np.full(PLACES, 1 / PLACES), []
    for log in logs:
        belief = move @ belief * np.exp(log - log.max())
        belief /= belief.sum()
        estimates.append(np.angle(belief @ np.exp(2j * np.pi * places)) / (2 * np.pi) % 1)
    return np.asarray(estimates)


def decoder(position, counts, held_out: np.ndarray) -> np.ndarray:
    """The Poisson decoder, its three numbers chosen in the training bins."""
    rest = np.setdiff1d(np.arange(len(position)), held_out)
    cut = 4 * len(rest) // 5
    train, check = rest[:cut], rest[cut:]

    def error(numbers):
        found = poisson(position[train], counts[train], counts[check], *numbers)
        return circular(found, position[check]).mean()

    best = min(itertools.product(SMOOTHINGS, STEPS, JUMPS), key=error)
    return poisson(position[rest], counts[rest], counts[held_out], *best)


def metrics(position, counts, field) -> dict[str, dict[str, float]]:
    """Mean errors of ridge regression from one bin, in cm, by metric of the observations."""
    settings = {"standard deviations": None, "map": (20, 0.1)}
    settings |= {f"map, {rank} coordinates": (rank, 0.1) for rank in (10, 300)}
    settings |= {f"map, shrinkage {share}": (20, share) for share in (0.02, 0.3)}
    results = {}
    for kind in ("spikes", "field"):
        seen = observations(kind, counts, field)
        for name, setting in settings.items():
            errors = [
                mapped_errors(position, seen, setting, held_out)
                for held_out in np.array_split(np.arange(len(position)), FOLDS)[::3]
            ]
            found = np.concatenate(errors, axis=1).mean(axis=1).min()
            results.setdefault(kind, {})[name] = float(found)
            print(kind, name, f"{found:.1f}", flush=True)
    return results


def mapped_errors(position, seen, setting, held_out: np.ndarray) -> np.ndarray:
    """Errors `[12, m]` of ridge regression on the held-out bins, one row for each setting."""
    rest = np.setdiff1d(np.arange(len(position)), held_out)
    rest = rest[: _maps.in_blocks(len(rest))]
    states = on_circle(position)
    if setting is None:
        rows = np.sqrt(seen) if seen.dtype.kind == "i" else seen
        codes = jnp.asarray(rows / np.maximum(rows[rest].std(0), 1e-9))
    else:
        _maps.MAX_RANK, _maps.SHRINKAGE = setting
        widths: list[kbr.kernels.AbstractKernel] = [kbr.Gaussian(w / np.sqrt(2)) for w in WIDTHS]
        few = rest[spread(len(rest), CHOOSING)]
        chosen = _maps.choose_regression(widths, states[few], jnp.asarray(seen[few]))
        mapped = _maps.fit_discriminant_map(chosen, states[rest], jnp.asarray(seen[rest]))
        codes = jax.vmap(mapped)(jnp.asarray(seen))
    unit = kbr.median_heuristic(codes[rest[::2]])
    found = []
    for width, ridge in itertools.product(BANDWIDTHS, RIDGES):
        model = kbr.fit_conditional(
            kbr.Gaussian(width * unit), kbr.Linear(), codes[rest], states[rest], regularizer=ridge
        )
        mean = kbr.condition(model, codes[held_out]).weights @ states[rest]
        found.append(circular(place(mean), position[held_out]))
    return np.stack(found)


def summary(errors: list[np.ndarray]) -> dict[str, Any]:
    """Median and mean in cm, and the standard error of the folds' means, which are listed."""
    together, means = np.concatenate(errors), np.asarray([e.mean() for e in errors])
    spread = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else float("nan")
    return {
        "median": float(np.median(together)),
        "mean": float(together.mean()),
        "se": float(spread),
        "means": means.tolist(),
    }


def main(*kinds: str) -> None:
    kinds = kinds or ("spikes", "field", "both")
    position, counts, field = load()
    position, results = position[1:], experiment.previous("rat") | {"published": PUBLISHED}
    folds = np.array_split(np.arange(len(position)), FOLDS)
    if "map" in kinds:
        results["map"] = metrics(position, counts, field)
        experiment.save("rat", results)
    if "rival" in kinds:
        results["rival"] = rivals(position, observations("spikes", counts, field), folds)
        experiment.save("rat", results)
    for kind in (kind for kind in kinds if kind in ("spikes", "field", "both")):
        seen = observations(kind, counts, field)

        def fold(number, kind=kind, seen=seen):
            held_out, start = folds[number], time.perf_counter()
            estimates = learned(position, seen, held_out)
            seconds = time.perf_counter() - start
            if kind == "spikes":
                estimates["Poisson decoder"] = decoder(position, seen, held_out)
            errors = {n: circular(found, position[held_out]) for n, found in estimates.items()}
            return {"seconds": seconds, "errors": errors}

        with tqdm(total=FOLDS, desc=kind, unit="fold") as bar:
            rows = experiment.repeat(f"rat {kind}", fold, FOLDS, bar)
        results[kind] = {
            name: summary([np.asarray(row["errors"][name]) for row in rows])
            for name in rows[0]["errors"]
        } | {"seconds": float(np.mean([row["seconds"] for row in rows]))}
        print(kind, results[kind], flush=True)
        experiment.save("rat", results)


if __name__ == "__main__":
    experiment.start(main)
