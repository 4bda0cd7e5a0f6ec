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
# # Testing hypotheses with embeddings
#
# Are two samples of one distribution? Are two variables independent, or independent given a third one, or where the third one has a
# given value? Each question is about the distance of an embedding from what the hypothesis says it is, and each answer a p-value.
# Points may be anything with a kernel, and nothing is assumed about distributions.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import kbr_jax as kbr

keys = iter(jax.random.split(jax.random.key(1), 20))
half, unit = kbr.Gaussian(0.5), kbr.Gaussian(1.0)

# %% [markdown]
# ## Two samples
#
# A normal sample and one of two narrow humps with the same mean and variance: no t-test tells them apart. The test tries
# 21 kernels and lets its permutations try them as well, so that the choice costs no level.

# %%
n = 200
normal = jax.random.normal(next(keys), (n, 1))
humps = 0.9 * jnp.where(jax.random.bernoulli(next(keys), shape=(n, 1)), 1, -1) + 0.44 * jax.random.normal(
    next(keys), (n, 1)
)
two_samples = kbr.hypotheses.two_sample_test(None, normal, humps, key=next(keys))
print(f"same mean, same variance: p = {float(two_samples.p_value):.3f}")

# %% [markdown]
# ## Independence
#
# Points on a noisy circle are uncorrelated, and as dependent as can be.

# %%
angle = jax.random.uniform(next(keys), (n, 1), maxval=2 * np.pi)
x, y = (side + 0.2 * jax.random.normal(next(keys), (n, 1)) for side in (jnp.cos(angle), jnp.sin(angle)))
print(f"circle: correlation {float(jnp.corrcoef(x[:, 0], y[:, 0])[0, 1]):+.2f}, ", end="")
print(f"p = {float(kbr.hypotheses.independence_test(half, half, x, y, key=next(keys)).p_value):.3f}")

# %% [markdown]
# ## Independence given a third variable
#
# Two children of one cause are dependent. Given the cause they are not. The test chooses its own regressions on the cause.

# %%
cause = jax.random.normal(next(keys), (n, 1))
first = jnp.sin(2 * cause) + 0.3 * jax.random.normal(next(keys), (n, 1))
second = cause + 0.3 * jax.random.normal(next(keys), (n, 1))
together = kbr.hypotheses.independence_test(unit, unit, first, second, key=next(keys))
given = kbr.hypotheses.conditional_independence_test(
    None, None, None, first, second, cause, key=next(keys)
)
print(f"two effects of one cause: p = {float(together.p_value):.3f}; given the cause: p = {float(given.p_value):.3f}")

# %% [markdown]
# ## Where?
#
# Two responses to a stimulus follow their own curves, and share their noise only where the stimulus is strong. A model of both
# given the stimulus is a conditional embedding; the size of its conditional covariance operator, stimulus by stimulus, says where
# they depend on each other. Many points are many tests: with 40 of them, expect two below 0.05 by chance.

# %%
stimulus = jax.random.uniform(next(keys), (400, 1), minval=-2, maxval=2)
shared, own_a, own_b = jax.random.normal(next(keys), (3, 400, 1))
strength = jnp.clip(stimulus, 0, 1)
response_a = jnp.sin(2 * stimulus) + 0.4 * (strength * shared + (1 - strength) * own_a)
response_b = stimulus + 0.4 * (strength * shared**2 + (1 - strength) * own_b)
model = kbr.fit_conditional(
    kbr.Gaussian(0.4),
    kbr.TensorProduct((kbr.Gaussian(0.5), kbr.Gaussian(0.5))),
    stimulus,
    (response_a, response_b),
    regularizer=1e-3,
)
at = jnp.linspace(-1.9, 1.9, 40)[:, None]
local = kbr.experimental.local_dependence_test(model, at, key=next(keys))
low, high = (float(jnp.mean(local.p_value[side] <= 0.05)) for side in (at[:, 0] < -0.2, at[:, 0] > 0.5))
print(f"dependence found at {low:.0%} of weak and {high:.0%} of strong stimuli")

# %% [markdown]
# ## The picture
#
# Left, the embeddings of the two samples, and their witness function, largest where the distributions differ most. Right, how strongly the responses
# depend on each other at each stimulus, and what chance alone stays below in 95 of 100 cases.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
line = jnp.linspace(-3.2, 3.2, 200)[:, None]
narrow = kbr.Gaussian(0.3)
for sample, color, label in ((normal, "0.5", "normal"), (humps, "tab:orange", "two humps")):
    left.plot(line, kbr.evaluate(kbr.embed(narrow, sample), line), color=color, label=label)
difference = kbr.witness(kbr.embed(narrow, humps), kbr.embed(narrow, normal), line)
left.plot(line, difference / jnp.max(jnp.abs(difference)) / 2, color="black", label="witness (scaled)")
left.set(title=f"two samples: p = {float(two_samples.p_value):.3f}", xlabel="value")
left.legend(frameon=False, fontsize=8)
right.fill_between(
    np.asarray(at)[:, 0],
    0,
    np.quantile(np.asarray(local.null), 0.95, axis=1),
    color="0.85",
    label="95 % of chance",
)
right.plot(at, local.statistic, color="tab:blue", label="dependence of the responses")
right.set(title="dependence at each stimulus", xlabel="stimulus", ylabel=r"$|C_{YZ|x}|^2$", ylim=(0, None))
right.legend(frameon=False, fontsize=8)
plt.show()
