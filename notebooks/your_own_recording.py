# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own recording, in ten minutes
#
# Two arrays are needed: what you want to know, at times when you knew it, and what was seen at the same times. Here an animal runs
# around a track, and 30 neurons are counted in bins of 100 ms. Replace this cell by your own arrays.

# %%
import pathlib
import subprocess
import sys
import tempfile

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import kbr_jax as kbr
from kbr_jax import plotting

rng = np.random.default_rng(0)
speed = 0.12 + 0.05 * np.sin(np.arange(750) / 40) + 0.03 * rng.normal(size=750)
angle = np.cumsum(speed)
places, peaks = rng.uniform(0, 2 * np.pi, 30), rng.gamma(2.0, 0.8, 30)
rates = 0.05 + peaks * np.exp(4 * (np.cos(angle[:, None] - places) - 1))

states = np.stack([np.cos(angle), np.sin(angle)], axis=1)  # [T, 2]; an angle has no mean, its cosine and sine have
counts = rng.poisson(rates)  # [T, 30], integers

# %% [markdown]
# ## Fit
#
# `learn_filter` chooses every parameter on stretches of the training part that it holds out. The rest is for the test.
# Print the report and look at three things. Is a rival as good? Then take the rival. Do beliefs come back from a wrong start? Do the
# regions hold what they say?

# %%
filt, report = kbr.learn_filter(states[:450], counts[:450], progress=False)
print(report)
plotting.plot_report(report)
plt.show()

# %% [markdown]
# ## Filter
#
# One scan over the test part. `diagnose` looks at the run for what makes filters fail.

# %%
run = kbr.run_filter(filt, counts[450:])
estimates = np.asarray(kbr.state_mean(filt, run))
print(kbr.diagnose(filt, run))
error = np.angle(np.exp(1j * (np.arctan2(estimates[:, 1], estimates[:, 0]) - angle[450:])))
print(f"median error {np.degrees(np.median(np.abs(error))):.1f} degrees, mean {np.degrees(np.abs(error).mean()):.1f}")
level = kbr.embedding.credible_level(
    kbr.belief(filt, run), states[450:], temperature=report.temperature
)
print("regions of 50, 80 and 95 % hold the truth in", np.round(kbr.tuning.coverage(level), 2))

# %% [markdown]
# ## Save it, and go on in another process
#
# The file holds the arrays and the kernels. A process that filters online loads it, and takes one observation at a time.

# %%
folder = pathlib.Path(tempfile.mkdtemp())
kbr.save(folder / "filter.kbr", filt)
np.save(folder / "counts.npy", counts[450:470])
program = """
import sys, jax, numpy as np, kbr_jax as kbr

filt, counts = kbr.load(sys.argv[1]), np.load(sys.argv[2])
step = jax.jit(kbr.filter_step)
state = kbr.init_filter(filt)
for observation in counts:
    state, output = step(filt, state, observation)
print(*map(float, kbr.state_mean(filt, output)))
"""
online = subprocess.run(
    [sys.executable, "-c", program, folder / "filter.kbr", folder / "counts.npy"],
    capture_output=True,
    text=True,
    check=True,
).stdout
print("online", online.strip(), "in one scan", estimates[19])
assert np.allclose([float(number) for number in online.split()], estimates[19], atol=1e-3)

# %%
grid = np.linspace(-np.pi, np.pi, 200)
around = jnp.asarray(np.stack([np.cos(grid), np.sin(grid)], axis=1))
density = np.asarray(kbr.evaluate(kbr.belief(filt, run), around))
fig, axis = plt.subplots(figsize=(9, 3.5))
axis.imshow(
    np.maximum(density, 0).T, origin="lower", aspect="auto", cmap="Blues", extent=(0, 30, -180, 180)
)
wrapped = np.degrees(np.angle(np.exp(1j * angle[450:])))
axis.plot(np.arange(300) / 10, wrapped, ".", color="black", markersize=2, label="true place")
axis.set(xlabel="time (s)", ylabel="place (degrees)", title="Belief of the filter")
axis.legend(loc="upper right")
plt.tight_layout()
plt.show()
