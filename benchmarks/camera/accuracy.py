"""Every camera method on the test half of both data sets, at every noise level, over seeds of the
noise.

    python -m benchmarks.camera.accuracy

Parameters come from `camera_selection` (training half only). Published numbers on the authors' own
frames, which were never released (S13 table 1, mean squared error): trace kernel .146 at variance
1e-4 and .210 at 1e-3; Kalman filter with quaternions .557 and .541. They are not comparable with
these frames.
"""

import sys

import numpy as np
from tqdm import tqdm

from .. import experiment
from . import video as camera
from .methods import METHODS, run
from .selection import selected

COMMAND = "python -m benchmarks.camera.accuracy"
SETTINGS = {"camera_lookalike": (1e-3, 1e-2), "camera_rotation": (0.0, 1e-4, 1e-3, 1e-2)}
SEEDS = {"camera_lookalike": (0, 1, 2), "camera_rotation": (0,)}


def main() -> None:
    wanted = sys.argv[1:] or list(SETTINGS)
    results: dict[str, dict] = {}
    for name in wanted:
        levels = SETTINGS[name]
        results[name] = {}
        with tqdm(total=len(levels) * len(SEEDS[name]) * len(METHODS), unit="run") as bar:
            for variance in levels:
                parameters, rows = selected(name, variance), {method: [] for method in METHODS}
                for seed in SEEDS[name]:
                    data = camera.load(name, variance, seed)
                    rotations, frames = data.part(0, camera.SPLIT)
                    truth, tests = data.part(camera.SPLIT, 2 * camera.SPLIT)
                    for method in METHODS:
                        track = run(method, rotations, frames, tests, parameters.get(method, {}))
                        rows[method].append(camera.summary(track.estimates, truth))
                        bar.update()
                results[name][f"{variance:g}"] = {
                    method: {
                        "mean": float(np.mean([row["mean"] for row in values])),
                        "mean_se": values[0]["mean_se"],
                        "seeds": [row["mean"] for row in values],
                        "median": float(np.mean([row["median"] for row in values])),
                        "trace": float(np.mean([row["trace"] for row in values])),
                    }
                    for method, values in rows.items()
                }
        experiment.save(f"camera_accuracy_{name}", f"{COMMAND} {name}", results[name])
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
                    for method in METHODS
                ],
            )
        )


if __name__ == "__main__":
    main()
