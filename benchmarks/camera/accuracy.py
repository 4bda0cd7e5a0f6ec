"""Every camera method on the test half of both data sets, at every noise level, over seeds of the
noise.

    python -m benchmarks.camera.accuracy [camera_lookalike | camera_rotation | METHOD ...]

If methods are given, the others keep their last results.
Parameters come from `camera_selection` (training half only). Published numbers on the authors' own
frames, which were never released (S13 table 1, mean squared error): trace kernel .146 at variance
1e-4 and .210 at 1e-3; Kalman filter with quaternions .557 and .541. They are not comparable with
these frames.
"""

from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from .. import experiment
from . import video as camera
from .methods import METHODS, run
from .selection import selected

SETTINGS = {"camera_lookalike": (1e-3, 1e-2), "camera_rotation": (0.0, 1e-4, 1e-3, 1e-2)}
SEEDS = {"camera_lookalike": 3, "camera_rotation": 1}


def repetition(
    name: str, variance: float, seed: int, methods: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Errors of the methods at one seed of the noise."""
    data, parameters = camera.load(name, variance, seed), selected(name, variance)
    rotations, frames = data.part(0, camera.SPLIT)
    truth, tests = data.part(camera.SPLIT, 2 * camera.SPLIT)
    return {
        method: camera.summary(
            run(method, rotations, frames, tests, parameters.get(method, {})).estimates, truth
        )
        for method in methods
    }


def main(*wanted: str) -> None:
    methods = [method for method in METHODS if method in wanted] or METHODS
    part = "" if methods == METHODS else ", ".join(methods)
    results: dict[str, dict] = {}
    for name in [name for name in SETTINGS if name in wanted] or SETTINGS:
        levels, file = SETTINGS[name], f"camera_accuracy_{name}"
        results[name] = experiment.previous(file) if part else {}
        with tqdm(total=len(levels) * SEEDS[name], unit="seed") as bar:
            for variance in levels:
                rows = experiment.repeat(
                    f"camera accuracy {name} {variance} {part}",
                    lambda seed, n=name, v=variance: repetition(n, v, seed, methods),
                    SEEDS[name],
                    bar,
                )
                results[name].setdefault(f"{variance:g}", {}).update(
                    {
                        method: {
                            key: float(np.mean([row[method][key] for row in rows]))
                            for key in ("mean", "median", "trace")
                        }
                        | {
                            "mean_se": rows[0][method]["mean_se"],
                            "seeds": [row[method]["mean"] for row in rows],
                        }
                        for method in methods
                    }
                )
        experiment.save(file, results[name], name, part=part)
        header = [f"{name}: mean error", *(f"variance {v:g}" for v in levels)]
        print(
            experiment.table(
                header,
                [
                    [
                        method,
                        *(
                            f"{cell[method]['mean']:.3f} ± {cell[method]['mean_se']:.3f}"
                            for cell in results[name].values()
                        ),
                    ]
                    for method in methods
                ],
            )
        )


if __name__ == "__main__":
    experiment.start(main, double=False)
