"""The demo: a camera's orientation from its noisy video, in a room where most views look alike from
two directions.

    make demo
    python -m benchmarks.camera.demo results  # to record them

Trains on the first half of `camera_lookalike` (1800 frames of 20 x 20 x 3 pixels, Gaussian noise of
variance 1e-3), filters the second half with every method, prints one table, writes
`camera_demo.json` and `camera_demo.png` in `build/demo`, which git ignores, or with the others of
the experiments.
"""

import pathlib
import time

from tqdm import tqdm

from .. import experiment
from . import video as camera
from .figure import draw
from .methods import METHODS, run
from .selection import selected

VARIANCE = 1e-3


def main(word: str = "") -> None:
    start = time.perf_counter()
    data = camera.load("camera_lookalike", VARIANCE)
    rotations, frames = data.part(0, camera.SPLIT)
    truth, tests = data.part(camera.SPLIT, 2 * camera.SPLIT)
    parameters = selected("camera_lookalike", VARIANCE)
    tracks = {}
    with tqdm(total=len(METHODS) * len(tests), unit="frame") as bar:
        for method in METHODS:
            bar.set_description(method)
            tracks[method] = run(
                method, rotations, frames, tests, parameters.get(method, {}), tick=bar.update
            )
        bar.set_description("done")
    results = {
        method: {**camera.summary(track.estimates, truth), "milliseconds": track.milliseconds}
        | {"parameters": parameters.get(method)}
        for method, track in tracks.items()
    }
    print(
        experiment.table(
            ["method", "mean error", "median error", "mean trace", "ms per frame"],
            [
                [
                    method,
                    f"{r['mean']:.3f} ± {r['mean_se']:.3f}",
                    f"{r['median']:.3f} ± {r['median_se']:.3f}",
                    f"{r['trace']:.2f} ± {r['trace_se']:.2f}",
                    f"{r['milliseconds']:.1f}",
                ]
                for method, r in results.items()
            ],
        )
    )
    print(
        "Frobenius distance to the true rotation (half a turn is 2.83), ± standard error over "
        "segments of 100 frames."
    )
    folder = figures = pathlib.Path("build/demo")
    if word == "results":
        folder, figures = experiment.RESULTS, experiment.FIGURES
    figures.mkdir(parents=True, exist_ok=True)
    figure = figures / "camera_demo.png"
    draw(data, tracks[METHODS[0]], tracks["ridge regression per frame"], figure)
    seconds = time.perf_counter() - start
    path = experiment.save(
        "camera_demo",
        {"variance": VARIANCE, "seconds": seconds, "methods": results},
        folder=folder,
    )
    print(f"{seconds:.0f} s; wrote {path} and {figure}")


if __name__ == "__main__":
    experiment.start(main, double=False)
