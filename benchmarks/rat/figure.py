r"""The belief about the rat's place over time, and the errors of one run.

    python -m benchmarks.rat.figure

The filter is learned from spikes and field without the fifth of ten folds, as in
`benchmarks.rat.decoding`, and draws the first 15 seconds of movement of that fold.
"""

import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment
from .decoding import FOLDS, TRACK, learn, load, observations, on_circle, place

FOLD, BINS, PLACES = 4, 150, 145


def main() -> None:
    import matplotlib.pyplot as plt

    position, counts, field = load()
    seen, position = observations("both", counts, field), position[1:]
    held_out = np.array_split(np.arange(len(position)), FOLDS)[FOLD]
    filt, report = learn(position, seen, held_out)
    print(report)
    run = kbr.run_filter(filt, jnp.asarray(seen[held_out[:BINS]]))
    grid = (np.arange(PLACES) + 0.5) / PLACES
    density = np.asarray(kbr.evaluate(kbr.belief(filt, run), on_circle(grid)))
    figure, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
    # Each column is scaled by its largest value: shades compare places, not times.
    shades = np.maximum(density, 0) / density.max(axis=1, keepdims=True)
    extent = (0, BINS / 10, 0, TRACK)
    axis.imshow(shades.T, origin="lower", aspect="auto", cmap="Blues", extent=extent, vmax=1.3)
    times = (np.arange(BINS) + 0.5) / 10
    axis.plot(times, TRACK * position[held_out[:BINS]], "k.", markersize=4, label="rat")
    estimates = TRACK * place(kbr.state_mean(filt, run))
    axis.plot(times, estimates, "_", color="#d55e00", markersize=5, label="estimate")
    axis.set(xlabel="time of movement (s)", ylabel="place on the track (cm)")
    axis.legend(loc="upper right", fontsize=8)
    figure.savefig(experiment.FIGURES / "rat.png", dpi=130)


if __name__ == "__main__":
    experiment.start(main)
