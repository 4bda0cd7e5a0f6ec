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
# # Does more fertilizer help? Four answers to one question
#
# A field is fertilized, and its harvest is weighed. Good soil gets more fertilizer, because its owner can pay for it, and good soil has
# larger harvests anyway. The soil is not in the table. What does the fertilizer do?
#
# Here the data are made, so that the truth is known: the harvest grows with the dose, and falls again where it is too much.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import kbr_jax as kbr
from kbr_jax import causal

jax.config.update("jax_enable_x64", True)
keys = jax.random.split(jax.random.key(0), 7)
n = 800


def effect(dose):
    return 2 * dose - dose**2


soil, *noise = (jax.random.normal(key, (n,)) for key in keys)
price = noise[0]  # of the fertilizer: the same for all soils
weeds = -soil + noise[1] / 2  # counted in spring: a sign of the soil, near the harvest
tractor = soil + noise[2] / 2  # its size: a sign of the soil, near the dose
dose = 1 + 0.5 * soil - 0.5 * price + noise[3] / 4
harvest = effect(dose) + 1.5 * soil + noise[4] / 3
doses = jnp.linspace(0, 2, 41)

# %% [markdown]
# ## What a regression says
#
# The conditional embedding of the harvest given the dose says what fields with that dose had. It is right about that, and it is no answer.

# %%
regression, _ = kbr.learn_conditional(dose, harvest, progress=False)
naive = kbr.mean(kbr.condition(regression, doses))

# %% [markdown]
# ## What each rule says
#
# - If the soil had been measured, `intervene` would average over it.
# - The price moves the dose and nothing else: it is an *instrument*. The soil makes the harvest noisy, so a stiff kernel is the better one:
#   polynomials of degree 3. The default, a Gaussian kernel, asks for more data than these.
# - Weeds and tractors are signs of the soil. Weeds do not depend on the dose, and the harvest does not depend on the tractor: they are
#   *proxies*. One bridge goes from the weeds to the harvest, another one from the tractor to the dose. Both together are doubly robust.

# %%
known = causal.fit_outcome_bridge(dose, soil, None, harvest)
cubic = kbr.Polynomial(degree=3)
instrument = causal.fit_instrument(dose, price, harvest, kernels=(cubic, cubic))
outcome = causal.fit_outcome_bridge(dose, weeds, tractor, harvest)
treatment = causal.fit_treatment_bridge(dose, weeds, tractor, harvest)
robust = causal.doubly_robust(outcome, treatment)
print(f"strength of the instrument: {instrument.strength:.0f} (10 would be weak)")
print(f"share of the weeds that dose and tractor explain: {outcome.explained[0]:.2f}")

curves = {
    "regression": naive,
    "soil measured": kbr.mean(causal.intervene(known, doses)),
    "instrument: price": causal.structural(instrument, doses),
    "proxies: weeds, tractor": kbr.mean(causal.intervene(robust, doses)),
}
truth = effect(doses)
for name, curve in curves.items():
    print(f"{name:<24} root mean squared error {jnp.sqrt(jnp.mean((curve - truth) ** 2)):.2f}")

# %% [markdown]
# ## How sure is that?
#
# The band holds the whole curve with a probability of 95 %, where the curve does not bend too sharply for the data.

# %%
band = causal.confidence_band(robust, doses, key=jax.random.key(1))
_, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
for name, curve in curves.items():
    left.plot(doses, curve, label=name)
left.plot(doses, truth, "k--", label="truth")
left.set_xlabel("dose")
left.set_ylabel("mean harvest, if the dose were set")
left.legend()
right.fill_between(doses, band.lower, band.upper, alpha=0.3, label="95 % band, proxies")
right.plot(doses, band.mean)
right.plot(doses, truth, "k--", label="truth")
right.set_xlabel("dose")
right.legend()
plt.tight_layout()
plt.show()
