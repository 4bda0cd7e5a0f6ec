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
# # Extrapolating the dynamics of distributions
#
# A distribution drifts, and all there is are samples of it: one set at each time, with no pairing between the sets. Which
# distribution comes next? Each set becomes a mean embedding, a vector; a ridge regression learns the operator from each vector to
# the next; applied to the last vector, it predicts the distribution that nobody has seen (Lampert, CVPR 2015).

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import kbr_jax as kbr

n = 400
density = float((2 * np.pi) ** -0.5) * kbr.Gaussian(1.0)  # the paper's "Gaussian kernel with unit variance"
noise = jax.random.normal(jax.random.key(0), (10, n, 1))

# %% [markdown]
# ## Three drifts
#
# A mixture whose shares change, a Gaussian that moves, a Gaussian that contracts. The last distribution of each is kept back.

# %%
shares = np.arange(2, 9) / 10
sides = np.stack([np.where(np.arange(n) < share * n, 3.0, -3.0) for share in shares])[..., None]
steps = np.arange(1.0, 11)[:, None, None]
drifts = {
    "mixture with changing shares": sides + noise[:7],
    "translation": 10 - steps + noise,
    "concentration": (11 - steps) * noise,
}
standard = kbr.experimental.gaussian_mixture(jnp.zeros((1, 1)), jnp.ones(1))
truths = dict.fromkeys(drifts, standard) | {
    "mixture with changing shares": kbr.experimental.gaussian_mixture(jnp.array([[3.0], [-3.0]]), jnp.ones(2), jnp.array([0.8, 0.2]))
}

# %% [markdown]
# ## One step ahead
#
# `fit_dynamics` needs no setting: its regularizer is the sampling noise of the embeddings, unless another is given. The
# prediction is an `Embedding` like any other, with weights of both signs: expectations, distances and densities follow from it. Because
# the truth is a Gaussian here, the distance to it (to a sample of infinite size) has a closed form.

# %%
observed = {name: kbr.dynamics.sample_sequence(sets[:-1]) for name, sets in drifts.items()}
models = {name: kbr.dynamics.fit_dynamics(density, sets) for name, sets in observed.items()}
predictions = {name: kbr.dynamics.extrapolate(model, estimator="ridge") for name, model in models.items()}
stacked = {name: kbr.dynamics.combine(density, observed[name], kbr.dynamics.stacked_forecast(model).coefficients) for name, model in models.items()}
for name, prediction in predictions.items():
    last = kbr.embed(density, drifts[name][-2])
    distances = [kbr.experimental.mmd_mixture(p, truths[name]) for p in (last, prediction, stacked[name])]
    print(f"{name:30s} last set {distances[0]:.3f}, predicted {distances[1]:.3f}, stacked forecast {distances[2]:.3f}")

# %% [markdown]
# ## Samples of the future
#
# Herding turns the prediction back into points: each is placed where the prediction has most mass that the points before it do not
# yet stand for. Negative densities, which a signed prediction may have, are gone after it.

# %%
windows = {"mixture with changing shares": (-7, 7), "translation": (-3, 5), "concentration": (-6, 6)}
herded = {
    name: kbr.herd(prediction, jnp.linspace(*windows[name], 801)[:, None], num_points=n).embedding
    for name, prediction in predictions.items()
}

# %% [markdown]
# ## The picture
#
# Observed embeddings in blue (the last three, the latest darkest), the predicted one in orange, herded in green, the truth dashed.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
for axis, name in zip(axes, drifts, strict=True):
    line = jnp.linspace(windows[name][0] - 1, windows[name][1] + 2, 300)[:, None]
    for age, shade in ((4, 0.35), (3, 0.6), (2, 0.9)):
        seen = kbr.evaluate(kbr.embed(density, drifts[name][-age]), line)
        axis.plot(line, seen, color="#0072b2", alpha=shade, linewidth=1.2, label="observed" if age == 2 else None)
    axis.plot(line, kbr.evaluate(predictions[name], line), color="#d55e00", linewidth=2.2, label="predicted")
    axis.plot(line, kbr.evaluate(herded[name], line), color="#009e73", linewidth=1.4, label="predicted, herded")
    axis.plot(line, kbr.experimental.evaluate_mixture(density, truths[name], line), "k--", linewidth=1.2, label="true next")
    axis.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axis.set_title(name, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
axes[0].legend(frameon=False, fontsize=8, loc="upper left")
plt.show()
