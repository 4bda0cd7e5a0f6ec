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
# # First steps: a sample, a condition, Bayes' rule
#
# In kbr_jax a distribution is a weighted sample, seen through a kernel: $\mu = \sum_i w_i\, k(x_i, \cdot)$. The rules of
# probability act on the weights. No density is ever written down, only pairs of points are compared.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import kbr_jax as kbr
from kbr_jax import plotting

# %% [markdown]
# ## A sample becomes a function
#
# Two samples of 500 numbers with the same mean and the same variance. Their embeddings differ, and the witness function shows
# where. Its norm is the maximum mean discrepancy, `mmd`; among two samples of one distribution it would be near 0.

# %%
keys = jax.random.split(jax.random.key(1), 8)
sides = jnp.where(jax.random.bernoulli(keys[0], shape=(500,)), 1.0, -1.0)
two_bumps = 0.9 * sides + np.sqrt(0.19) * jax.random.normal(keys[1], (500,))  # variance 0.81 + 0.19
one_bump, one_more = jax.random.normal(keys[2], (2, 500))

kernel = kbr.Gaussian(0.4)
p, q, again = (kbr.embed(kernel, sample) for sample in (two_bumps, one_bump, one_more))
print(f"distance of two bumps and one: {kbr.mmd(p, q):.3f};  of two samples of one bump: {kbr.mmd(q, again):.3f}")

figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
line = jnp.linspace(-3, 3, 200)
plotting.plot_embedding(p, line, axis=axes[0]).set_title("an embedding, and the sample it stands on", loc="left", fontsize=10)
plotting.plot_witness(p, q, line, axis=axes[1]).set_title("two bumps (p) against one (q)", loc="left", fontsize=10)
plt.show()

# %% [markdown]
# ## Conditioning
#
# Somewhere in the square is a thing at `x`. A beacon tells its distance, with noise. From 1225 pairs (position, distance), one
# somewhere in each cell of a grid, `fit_conditional` learns the position given the distance, and `condition` gives its
# embedding for any distance: the part of a ring that lies in the square, which no mean and variance could describe. The weights
# (dots in the last picture) may be negative (orange crosses).

# %%
beacons = jnp.array([[-0.8, 0.0], [0.9, 0.0]])
noise = 0.2


def distances(x):
    """From each position [..., 2] to both beacons [..., 2]."""
    return jnp.linalg.norm(x[..., None, :] - beacons, axis=-1)


corners = jnp.stack(jnp.meshgrid(*[jnp.arange(35.0)] * 2), axis=-1).reshape(-1, 2)
x = (corners + jax.random.uniform(keys[3], corners.shape)) / 35 * 3.2 - 1.6
y = distances(x) + noise * jax.random.normal(keys[4], x.shape)
kernel_x = kbr.Gaussian(0.3)
near = kbr.fit_conditional(kbr.Gaussian(0.3), kernel_x, y[:, 0], x, regularizer=1e-4)  # P(x | first distance)
truth = jnp.array([0.2, 1.0])
seen = distances(truth)
arc = kbr.condition(near, seen[0])
print(f"weights sum to {arc.mass:.3f}, and lie between {arc.weights.min():.4f} and {arc.weights.max():.4f}")

# %% [markdown]
# ## Bayes' rule, and a prior that decides
#
# Both beacons lie on the horizontal axis, so even two distances leave two places, mirror images of each other. Bayes' rule takes
# the other direction: a model of the *observation given the position*, learned once, and any prior over positions. Under the flat
# prior the posterior keeps both places. Under a prior that is broad and leans only slightly upwards, the same model and the same
# observation put most, not all, of the belief on the upper one.

# %%
model = kbr.fit_conditional(kernel_x, kbr.Gaussian(0.3), x, y, regularizer=1e-4)  # P(y | x)
flat = kbr.embed(kernel_x, x)
upwards = jnp.array([0.0, 0.5]) + 0.8 * jax.random.normal(keys[5], (800, 2))
leaning = kbr.embed(kernel_x, upwards)
posteriors = [kbr.bayes_rule(model, prior, seen, regularizer=1e-4) for prior in (flat, leaning)]

# %% [markdown]
# Is that right? Here the densities are known, so the exact posterior can be put on a fine grid, and a grid with weights is an
# embedding too: `mmd` tells how far the kernel's answer is from it.

# %%
side = jnp.linspace(-1.6, 1.6, 61)
cells = jnp.stack(jnp.meshgrid(side, side, indexing="ij"), axis=-1).reshape(-1, 2)
likelihood = jnp.exp(-jnp.sum((distances(cells) - seen) ** 2, axis=-1) / (2 * noise**2))
densities = [jnp.ones(len(cells)), jnp.exp(-jnp.sum((cells - jnp.array([0.0, 0.5])) ** 2, axis=-1) / (2 * 0.8**2))]
for name, density, posterior in zip(("flat", "leaning"), densities, posteriors):
    exact = kbr.embed(kernel_x, cells, likelihood * density / jnp.sum(likelihood * density))
    belief, _ = kbr.normalize(posterior)
    upper = [float(kbr.expectation(e, lambda z: jnp.where(z[1] > 0, 1.0, 0.0))) for e in (belief, exact)]
    print(
        f"{name} prior: {upper[0]:.2f} of the belief above the axis (exactly {upper[1]:.2f}); distance to the exact "
        f"posterior {kbr.mmd(belief, exact) / kbr.embedding.norm(exact):.2f} of its norm"
    )

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained", sharey=True)
titles = ("one distance: an arc", "two distances: two places", "two distances and a prior that leans upwards")
for axis, belief, title, used in zip(axes, (arc, *posteriors), titles, (1, 2, 2)):
    plotting.plot_embedding(belief, (side, side), axis=axis)
    axis.plot(*beacons[:used].T, "^", color="#0072b2", mec="white", ms=11, ls="none", label="beacons")
    axis.plot(*truth, "*", color="#d55e00", mec="white", ms=17, ls="none", label="the thing")
    axis.set_title(title, fontsize=11)
axes[2].contour(side, side, densities[1].reshape(61, 61).T, 4, colors="gray", linestyles="dotted", linewidths=1)
axes[0].legend(loc="lower left", fontsize=9)
axes[2].text(-1.5, -1.5, "dotted: the prior", fontsize=9, color="dimgrey")
plt.show()
