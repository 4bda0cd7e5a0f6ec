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
# # 64 sequences at once
#
# Recordings of a noisy pendulum, of unequal length, with gaps. Only its horizontal displacement is seen, not its speed, and
# hanging at an angle of 60 degrees looks the same as standing at 120. The sequences are padded to one length, masks say what is
# real, and one compiled program filters them all.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import kbr_jax as kbr
from kbr_jax import plotting

STEP, NOISE, LONGEST = 0.25, 0.2, 160


@jax.jit
@jax.vmap
def simulate(key):
    """A pendulum that is kicked at random: states (angle, speed) [T, 2] and displacements [T, 1]."""
    start, kick, noise = jax.random.split(key, 3)

    def move(state, kick):
        speed = state[1] - STEP * (jnp.sin(state[0]) + 0.05 * state[1]) + 0.08 * kick
        # Never over the top: a wall stands there.
        angle = jnp.clip(state[0] + STEP * speed, -3, 3)
        speed = jnp.where(jnp.abs(angle) == 3, -speed, speed)
        return jnp.stack([angle, speed]), state

    first = jax.random.uniform(start, (2,), minval=jnp.array([-2.5, -0.5]), maxval=jnp.array([2.5, 0.5]))
    _, states = jax.lax.scan(move, first, jax.random.normal(kick, (LONGEST,)))
    return states, jnp.sin(states[:, :1]) + NOISE * jax.random.normal(noise, (LONGEST, 1))


rng = np.random.default_rng(0)
states, observations = (np.array(part) for part in simulate(jax.random.split(jax.random.key(0), 128)))
lengths = rng.integers(60, LONGEST + 1, 128)
real = np.arange(LONGEST) < lengths[:, None]
states[~real], observations[~real] = np.nan, np.nan  # padding may hold anything

# %% [markdown]
# ## Training on 64 of them
#
# A filter learns from triples (state, observation, next state). A triple counts where both its states are real; the mask says
# so, and padding never enters. Moments are sums over the triples. A step of a filter on moments costs the same for a thousand
# triples as for a million. Soft cells let it clip negative weights.

# %%
train, test = slice(0, 64), slice(64, 128)
now, seen, later = (
    np.concatenate(part[train, place])
    for part, place in ((states, slice(-1)), (observations, slice(-1)), (states, slice(1, None)))
)
counts = np.concatenate(real[train, 1:])
kernel = kbr.Gaussian(jnp.array([0.4, 0.4]))  # one bandwidth for the angle, one for the speed
landmarks = kbr.kmeanspp_landmarks(None, now[counts], rank=120, key=jax.random.key(1))
kernel_seen = kbr.Gaussian(0.4)
maps = kbr.moments.moment_maps(
    kernel,
    kernel_seen,
    landmarks,
    kbr.greedy_landmarks(kernel_seen, seen[counts], rank=12),
    cells=kbr.soft_partition(kernel, landmarks),
    shift=True,
)
moments = kbr.moments.collect_moments(maps, now, seen, later, mask=counts)
emission = kbr.moments.fit_conditional(moments, regularizer=1e-4)
filt = kbr.KernelBayesFilter(emission, None, regularizer=1e-4, shift=True)
print(f"{counts.sum()} triples, from sequences of {lengths.min()} to {lengths.max()} steps")

# %% [markdown]
# ## Filtering the other 64
#
# Of these a fifth of all observations is lost, and 20 in a row somewhere: `observed` is False there, and in the padding. Where
# nothing was observed, the filter predicts.

# %%
gaps = rng.integers(30, 40, 64)
observed = real[test] & (rng.random((64, LONGEST)) > 0.2)
observed &= (np.arange(LONGEST) < gaps[:, None]) | (np.arange(LONGEST) >= gaps[:, None] + 20)


def run(filt, observations, observed):
    steps = kbr.run_filter(filt, observations, observed=observed)
    return kbr.belief(filt, steps).weights, kbr.state_mean(filt, steps)


alone, batch = jax.jit(run), jax.jit(jax.vmap(run, in_axes=(None, 0, 0)))
jax.block_until_ready(batch(filt, observations[test], observed))  # compiles
began = time.perf_counter()
weights, estimates = jax.block_until_ready(batch(filt, observations[test], observed))
together = time.perf_counter() - began
jax.block_until_ready(alone(filt, observations[64], observed[0]))
began = time.perf_counter()
for sequence, mask in zip(observations[64:72], observed):
    jax.block_until_ready(alone(filt, sequence, mask))
one = (time.perf_counter() - began) / 8
print(f"a sequence of {LONGEST} steps: {1e3 * one:.0f} ms alone, {1e3 * together / 64:.0f} ms in the batch of 64")

# %% [markdown]
# Errors only count where something is real. What a prediction is worth shows inside the gaps, against the best constant guess,
# the mean of the training states.

# %%
errors = np.sum((estimates - states[test]) ** 2, axis=-1)
guess = np.sum((states[test] - np.nanmean(states[train], axis=(0, 1))) ** 2, axis=-1)
inside = real[test] & ~observed & (np.arange(LONGEST) >= gaps[:, None]) & (np.arange(LONGEST) < gaps[:, None] + 20)
for name, mask in (("observed", observed), ("missing, now and then", real[test] & ~observed & ~inside), ("in the gaps", inside)):
    print(f"{name:22} root mean squared error {np.sqrt(errors[mask].mean()):.2f}, of a guess {np.sqrt(guess[mask].mean()):.2f}")

# %% [markdown]
# ## Four of the sequences
#
# The belief is over angle and speed. For a Gaussian kernel its marginal is at hand: the same weights on the angles alone. Ticks
# at the bottom mark what was observed. In the gaps the belief swings on and grows wider, and comes together again after them.

# %%
angles = np.linspace(-3.2, 3.2, 129)
figure, axes = plt.subplots(2, 2, figsize=(12, 6), layout="constrained", sharey=True, sharex=True)
for number, axis in enumerate(axes.flat):
    length = lengths[test][number]
    marginal = kbr.Embedding(kbr.Gaussian(0.25), landmarks.points[:, 0], weights[number, :length])
    plotting.plot_beliefs(
        marginal, angles, truth=states[test][number, :length, 0], estimate=estimates[number, :length, 0], axis=axis
    )
    ticks = np.flatnonzero(observed[number])
    axis.plot(ticks, np.full(ticks.shape, 0.03), "|", color="black", ms=5, mew=0.7, transform=axis.get_xaxis_transform())
    axis.set(xlim=(-0.5, LONGEST), yticks=[-np.pi / 2, 0, np.pi / 2], yticklabels=["-90°", "0°", "90°"])
    axis.set_title(f"{length} steps", loc="left", fontsize=10)
    if number != 1:
        axis.get_legend().remove()
    axis.set(xlabel="time" if number > 1 else "", ylabel="" if number % 2 else "angle")
plt.show()
