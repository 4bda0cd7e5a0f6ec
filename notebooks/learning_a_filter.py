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
# # Learning a filter
#
# A point goes round a circle, 0.3 radians a step give or take 0.15. Only its horizontal coordinate is seen, with noise: one
# observation cannot tell the upper half of the circle from the lower. The kernel Bayes filter learns motion and observation from
# one sequence with known states; here its bandwidths and regularizers are learned too, by gradient descent through the filter.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import kbr_jax as kbr
from kbr_jax import plotting

TURN, WANDER, NOISE = 0.3, 0.15, 0.4


@jax.jit
@jax.vmap
def simulate(key):
    """States [T, 2] on the circle and observations [T, 1], for each key."""
    start, walk, noise = jax.random.split(key, 3)
    moves = TURN + WANDER * jax.random.normal(walk, (500,))
    angles = jax.random.uniform(start, maxval=2 * jnp.pi) + jnp.cumsum(moves)
    states = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return states, states[:, :1] + NOISE * jax.random.normal(noise, (500, 1))


sequences = [np.asarray(part) for part in simulate(jax.random.split(jax.random.key(0), 4))]
training = [part[0, :250] for part in sequences]  # to fit filters on
held_out = [part[1, :100] for part in sequences]  # for the loss
validation = [part[2, :100] for part in sequences]  # to choose the step by
test = [part[3] for part in sequences]  # touched once, at the end

# %% [markdown]
# ## The loss is a fit and a run
#
# Whatever the parameters are, the filter is fitted anew inside the loss: so the gradient knows what they do to the fit. A start
# that looks reasonable: bandwidths at the median distances, and round numbers for the regularizers.

# %%
initial = {
    "states": kbr.median_heuristic(training[0]),
    "observations": kbr.median_heuristic(training[1]),
    "regularizer": jnp.float32(1e-2),
    "posterior_regularizer": jnp.float32(1e-2),
}


def fit(p):
    return kbr.fit_filter(
        kbr.Gaussian(p["states"]),
        kbr.Gaussian(p["observations"]),
        *training,
        regularizer=p["regularizer"],
        posterior_regularizer=p["posterior_regularizer"],
        landmarks_states=30,
        landmarks_observations=15,
    )


def error_on(sequence):
    return lambda p: kbr.filter_loss(fit(p), *sequence, burn_in=10)


began = time.perf_counter()
tuned = kbr.tune(
    error_on(held_out),
    initial,
    optax.adam(0.1),
    num_steps=40,
    positive=lambda p: p,  # all of them: tuned by their logarithms
    validation=error_on(validation),
)
learned = tuned.parameters
print(f"40 steps in {time.perf_counter() - began:.0f} s, most of it compilation; best at step {tuned.step}")
for name, value in learned.items():
    print(f"{name:22} {float(initial[name]):8.2g} -> {float(value):8.2g}")

# %%
axis = plotting.plot_history(tuned)
axis.set_ylabel("squared error of the state")
axis.figure.set_size_inches(6.5, 3.5)
plt.show()

# %% [markdown]
# ## Was it worth it?
#
# On the test sequence, against the best there is: the exact filter of the true motion and noise, on 360 angles.

# %%
turns = np.arange(360) * (2 * np.pi / 360)
circle = np.stack([np.cos(turns), np.sin(turns)], axis=-1).astype(np.float32)
moved = (turns[None, :] - turns[:, None] - TURN + np.pi) % (2 * np.pi) - np.pi
transition = np.exp(-(moved**2) / (2 * WANDER**2)).astype(np.float32)
transition /= transition.sum(axis=1, keepdims=True)


@jax.jit
def exact_filter(seen):
    def step(prior, o):
        belief = prior * jnp.exp(-((circle[:, 0] - o) ** 2) / (2 * NOISE**2))
        belief = belief / jnp.sum(belief)
        return belief @ transition, belief

    beliefs = jax.lax.scan(step, jnp.full(360, 1 / 360), seen[:, 0])[1]
    return kbr.Embedding(kbr.Gaussian(1.0), jnp.asarray(circle), beliefs), beliefs @ circle


@jax.jit
def run(p, seen):
    filt = fit(p)
    beliefs = kbr.belief(filt, kbr.run_filter(filt, seen))
    return beliefs, kbr.mean(beliefs)


@jax.jit
def error(estimate):
    return jnp.mean(jnp.sum((estimate - test[0])[10:] ** 2, axis=-1))


results = {"before": run(initial, test[1]), "after": run(learned, test[1]), "exact filter": exact_filter(test[1])}
for name, (_, estimate) in results.items():
    print(f"{name:14} squared error {error(estimate):.3f}")

# %% [markdown]
# 100 steps of the test sequence. The angle is read off the beliefs by evaluating them around the circle; in one kernel, the
# learned one, so that the three pictures differ by the weights alone.

# %%
shown = slice(60, 160)
kernel = results["after"][0].kernel
degrees = (np.degrees(turns) + 180) % 360 - 180
order = np.argsort(degrees)


def angle(points):
    return np.degrees(np.arctan2(points[shown, 1], points[shown, 0]))


figure, axes = plt.subplots(3, 1, figsize=(10, 8), layout="constrained", sharex=True, sharey=True)
for axis, (name, (beliefs, estimate)) in zip(axes, results.items()):
    plotting.plot_beliefs(
        kbr.Embedding(kernel, beliefs.points, beliefs.weights[shown]),
        circle[order],
        positions=degrees[order],
        truth=angle(test[0]),
        estimate=angle(np.asarray(estimate)),
        period=360,
        axis=axis,
    )
    axis.set_title(f"{name}: squared error {error(estimate):.3f}", loc="left")
    axis.set(ylabel="angle (degrees)", yticks=[-180, -90, 0, 90, 180], xlabel="time" if axis is axes[-1] else "")
    if axis is not axes[0]:
        axis.get_legend().remove()
plt.show()
