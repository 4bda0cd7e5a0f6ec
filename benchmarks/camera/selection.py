"""Parameters of every camera method, chosen on the training half alone.

    python -m benchmarks.camera.selection [camera_lookalike | camera_rotation | METHOD ...]

Three folds: train on two thirds of the training half, estimate on the third. A filter starts its
fold from a prior around the true first rotation, as one that is under way. The candidate of least
mean error is taken. The demo and `camera_accuracy` read `results/camera_selection_NAME.json`; the
rotation set is selected at variance 1e-3 alone and used at all its noise levels. If methods are
given, the others keep their last choices.
"""

import itertools
import json

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment
from . import video as camera
from .methods import FILTERS, KALMAN, REGRESSIONS, run

SETTINGS = [("camera_lookalike", 1e-3), ("camera_lookalike", 1e-2), ("camera_rotation", 1e-3)]


def product(**axes):
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def grids(name: str) -> dict[str, list[dict]]:
    """The candidates of each method."""
    spread = (
        product(h=[0.4, 0.6])
        if name == "camera_lookalike"
        else [{"h": 0.6}, {"h": 1.2, "truncation": 0.2}]
    )

    def with_spread(**axes):
        return [{**a, **b} for a in spread for b in product(**axes)]

    return {
        "kernel Bayes filter (b), clipped, truncated": with_spread(
            c=[0.7, 1.0], epsilon=[1e-2], delta=[1e-7, 1e-6, 1e-5]
        ),
        "importance-weighted, truncated": with_spread(
            c=[0.7, 1.0], epsilon=[1e-2], delta=[1e-4, 1e-3, 1e-2]
        ),
        "as in the papers, Gaussian kernel": product(
            h=[0.6], c=[1.0], epsilon=[1e-2], delta=[1e-5, 1e-4, 1e-3]
        ),
        "as in the papers, trace kernel": product(
            c=[1.0], epsilon=[1e-4], delta=[1e-5, 1e-4, 1e-3]
        ),
        "2009 filter": product(h=[0.6], c=[0.5, 1.0], epsilon=[1e-6, 1e-5, 1e-4, 1e-3]),
        KALMAN: product(ridge_share=[1e-2, 1e-1, 0.3]),
        "ridge regression per frame": product(c=[0.3, 0.5, 1.0], epsilon=[1e-6, 1e-5, 1e-4, 1e-3]),
        "ridge regression on a window": product(
            c=[0.5, 1.0], window=[2, 4, 8], epsilon=[1e-6, 1e-5, 1e-4, 1e-3]
        ),
    }


def folds():
    """Training runs and validation stretch of each fold."""
    third = camera.SPLIT // 3
    for k in range(3):
        held_out = slice(k * third, (k + 1) * third)
        yield np.r_[0 : held_out.start, held_out.stop : camera.SPLIT], held_out


def prior_around(rotation: np.ndarray, rotations: np.ndarray) -> kbr.Embedding:
    """The training states near a rotation, as a prior."""
    weights = jnp.exp(
        -jnp.sum((jnp.asarray(rotations) - rotation) ** 2, axis=(1, 2)) / (2 * 0.3**2)
    )
    return kbr.embed(kbr.Gaussian(0.6), rotations, weights / jnp.sum(weights))


def errors_of(method: str, data: camera.Camera, parameters: dict) -> np.ndarray:
    """Validation errors of all folds, mean of each segment."""
    means = []
    for rows, held_out in folds():
        rotations, frames = data.rotations[rows], data.frames[rows]
        truth, tests = data.rotations[held_out], data.frames[held_out]
        prior = prior_around(truth[0], rotations) if method in FILTERS else None
        track = run(method, rotations, frames, tests, parameters, prior)
        errors = np.nan_to_num(camera.frobenius(track.estimates, truth), nan=2.83)
        means.extend(errors.reshape(-1, camera.SEGMENT).mean(1))
    return np.asarray(means)


def select(method: str, data: camera.Camera, candidates: list[dict], bar: tqdm) -> dict:
    scores = []
    for parameters in candidates:
        means = errors_of(method, data, parameters)
        scores.append((float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means)))))
        bar.update()
    best = min(range(len(scores)), key=lambda i: scores[i][0])
    return {"parameters": candidates[best], "validation": scores[best]}


def selected(name: str, variance: float) -> dict[str, dict]:
    """The chosen parameters of every method, at the nearest noise level that was selected."""
    levels = json.loads((experiment.RESULTS / f"camera_selection_{name}.json").read_text())[
        "results"
    ]
    level = min(levels, key=lambda key: abs(np.log(float(key) / max(variance, 1e-6))))
    return {method: choice["parameters"] for method, choice in levels[level].items()}


def main(*wanted: str) -> None:
    settings = [s for s in SETTINGS if s[0] in wanted] or SETTINGS
    results: dict[str, dict] = {}

    def tried(name: str) -> dict[str, list[dict]]:
        found = grids(name)
        return {m: found[m] for m in found if m in wanted} or found

    with tqdm(
        total=sum(len(g) for name, _ in settings for g in tried(name).values()), unit="candidate"
    ) as bar:
        for name, variance in settings:
            data, level = camera.load(name, variance), f"{variance:g}"
            chosen = {m: select(m, data, candidates, bar) for m, candidates in tried(name).items()}
            part = "" if len(chosen) == len(grids(name)) else ", ".join(chosen)
            file = f"camera_selection_{name}"
            last = experiment.previous(file) if part else results.get(name, {})
            results[name] = last | {level: last.get(level, {}) | chosen}
            experiment.save(file, results[name], name, part=part)
            for method, choice in chosen.items():
                bar.write(
                    f"{name} {variance:g} {method}: {choice['parameters']} {choice['validation']}"
                )
    assert {*REGRESSIONS, *FILTERS, KALMAN} == set(grids("camera_lookalike"))


if __name__ == "__main__":
    experiment.start(main, double=False)
