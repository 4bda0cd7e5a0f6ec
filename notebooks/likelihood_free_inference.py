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
# # Inference without a likelihood: what happens inside a queue
#
# Customers arrive at a counter, wait, are served, leave. Only the times at which they leave are recorded. How long does a service
# take, and how often do customers arrive? The likelihood of the recorded times is an integral over all arrivals that were not seen;
# nobody writes it down. To simulate a queue takes five lines, and that is all that is needed here.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import kbr_jax as kbr

jax.config.update("jax_enable_x64", True)
names = ["shortest service", "range of services", "arrival rate"]
highest = jnp.array([10.0, 10.0, 1 / 3])


def prior(key):
    return highest * jax.random.uniform(key, (3,))


def queue(key, theta):
    """Times between departures of 50 customers; services are uniform, arrivals a Poisson process. Logarithms of seven quantiles."""
    serving, arriving = jax.random.split(key)
    services = theta[0] + theta[1] * jax.random.uniform(serving, (50,))
    arrivals = jnp.cumsum(jax.random.exponential(arriving, (50,))) / theta[2]

    def leave(last, customer):
        departure = jnp.maximum(last, customer[0]) + customer[1]
        return departure, departure

    _, departures = jax.lax.scan(leave, 0.0, (arrivals, services))
    gaps = jnp.diff(departures, prepend=0.0)
    return jnp.log(jnp.quantile(gaps, jnp.array([0, 0.1, 0.25, 0.5, 0.75, 0.9, 1])))


simulations = kbr.likelihood_free.simulate(queue, prior, 3000, key=jax.random.key(0))

# %% [markdown]
# ## One fit for every observation
#
# The conditional embedding of the parameters given the data is the posterior, for the prior that the parameters were drawn from.
# Bandwidth and regularizer have the least leave-one-out energy score on 500 of the simulations, in closed form: a score of the whole
# posterior, not of its mean alone. (`learn_conditional` does this by itself.) Then 200 landmarks represent the
# data of all 3000, and nothing has to be fitted again, whatever is observed.

# %%
scale = jnp.std(simulations.data, axis=0)
width = scale * kbr.median_heuristic(simulations.data[:500] / scale)
kernel_parameters = kbr.Gaussian(0.1 * highest)


def left_out(p):
    kernel = kbr.Gaussian(p["factor"] * width)
    first = simulations.data[:500], simulations.parameters[:500]
    fitted = kbr.fit_conditional(kernel, kernel_parameters, *first, regularizer=p["regularizer"])
    return kbr.leave_out_loss(fitted)


grid = {"factor": np.array([0.5, 1, 2, 4]), "regularizer": 10.0 ** np.arange(-6, -1)}
best = kbr.grid_search(left_out, grid).parameters
kernel_data = kbr.Gaussian(best["factor"] * width)
pairs = simulations.data, simulations.parameters
model = kbr.fit_conditional(
    kernel_data, kernel_parameters, *pairs, regularizer=best["regularizer"], landmarks_x=200
)
print({name: float(value) for name, value in best.items()})

truth = jnp.array([4.0, 3.0, 0.15])
observed = queue(jax.random.key(2), truth)
residuals = kbr.tuning.leave_out_residuals(model)
posterior = kbr.tuning.condition_adjusted(model, residuals, observed)  # atoms move with the regression
low, high = kbr.credible_interval(posterior, 0.8)
for name, *row in zip(names, truth, kbr.mean(posterior), low, high, strict=True):
    print("{:20s} true {:5.2f}, mean {:5.2f}, 80 % interval {:5.2f} to {:5.2f}".format(name, *map(float, row)))
busy = kbr.expectation(kbr.normalize(posterior)[0], lambda t: t[2] * (t[0] + t[1] / 2))
print(f"share of time that the counter is busy, expected {busy:.2f}, true {float(truth[2] * (truth[0] + truth[1] / 2)):.2f}")

# %% [markdown]
# ## Another prior, the same simulations
#
# Now a counter at the door says that about 0.2 customers arrive in a minute. Two ways take the simulations as they are. Where the
# density of the new prior is known, relative to that of the simulations, the atoms of the posterior are weighted by it. Where the
# prior is only a sample, kernel Bayes' rule takes it as it is. With this few simulations near so narrow a prior, the range
# and the rate go only a part of the way from the first posterior to the reference for this prior, computed below, and the shortest
# service moves away from it.

# %%
def at_the_door(theta):
    return np.exp(-((theta[:, 2] - 0.2) ** 2) / (2 * 0.02**2))


factors = jnp.asarray(at_the_door(posterior.points))
weighted = kbr.Embedding(posterior.kernel, posterior.points, posterior.weights * factors)
informed_posterior, share = kbr.normalize(weighted)

keys = jax.random.split(jax.random.key(3))
flat = jax.vmap(prior)(jax.random.split(keys[0], 1000))
informed = flat.at[:, 2].set(0.2 + 0.02 * jax.random.normal(keys[1], (1000,)))
forward = kbr.fit_conditional(
    kernel_parameters,
    kernel_data,
    simulations.parameters,
    simulations.data,
    regularizer=1e-4,
    landmarks_x=200,
    landmarks_y=200,
)
by_rule = kbr.bayes_rule(
    forward,
    kbr.embed(kernel_parameters, informed),
    observed,
    regularizer=best["regularizer"] ** 2,
    clipping=kbr.Clipping(truncation=0.0),
)

# %% [markdown]
# ## Beside regression ABC
#
# Approximate Bayesian computation accepts the simulations nearest to the observation and moves them onto it by local linear
# regression. With 100000 calls of the simulator it is the reference; with our 3000 it is the peer.


# %%
def regression_abc(table, y, accepted, factor=None):
    """Adjusted parameters and their weights; `factor` multiplies the weights, for another prior."""
    theta, data = np.asarray(table.parameters), np.asarray(table.data)
    away = (data - np.asarray(y)) / data.std(0)
    distances = np.sqrt((away**2).sum(1))
    index = np.argsort(distances)[:accepted]
    weights = 1 - (distances[index] / distances[index[-1]]) ** 2
    if factor is not None:
        weights = weights * factor(theta[index])
    design = np.hstack([np.ones((accepted, 1)), away[index]])
    root = np.sqrt(weights)[:, None]
    slopes = np.linalg.lstsq(root * design, root * theta[index], rcond=None)[0][1:]
    return theta[index] - away[index] @ slopes, weights / weights.sum()


large = kbr.likelihood_free.simulate(queue, prior, 100_000, key=jax.random.key(4))
references = [regression_abc(large, observed, 1000), regression_abc(large, observed, 10_000, at_the_door)]
rival = regression_abc(simulations, observed, 200)
for title, found, reference in (
    ("flat prior", posterior, references[0]),
    ("door prior", informed_posterior, references[1]),
    ("door prior as a sample, Bayes' rule", by_rule, references[1]),
):
    print(title, "kernels", np.round(kbr.mean(found), 3), "reference", np.round(reference[1] @ reference[0], 3))
print("flat prior, regression ABC with 3000 calls", np.round(rival[1] @ rival[0], 3))

# %% [markdown]
# ## Is it calibrated?
#
# Five hundred other queues, with parameters from the prior: one call for all of them. An 80 % interval should hold the true parameter
# in 80 % of the cases; errors are in units of the prior's standard deviation. With 3000 simulations in seven
# dimensions the kernel has to average over a wide neighborhood, in which the mean moves. Intervals of `condition` contain that movement
# and hold more than they say. `condition_adjusted` moves each simulated parameter with the mean: its intervals are narrower and hold
# about what they say.

# %%
tests = kbr.likelihood_free.simulate(queue, prior, 500, key=jax.random.key(5))
posteriors = kbr.condition(model, tests.data)
moved = jax.jit(jax.vmap(lambda y: kbr.credible_interval(kbr.tuning.condition_adjusted(model, residuals, y), 0.8)))
intervals = {"condition": kbr.credible_interval(posteriors, 0.8), "condition_adjusted": moved(tests.data)}
spread = np.asarray(highest) / np.sqrt(12)
adjusted = [regression_abc(simulations, y, 200) for y in tests.data]
errors = {
    "kernels": np.asarray(kbr.mean(posteriors)),
    "regression ABC, 200 accepted": np.stack([weights @ points for points, weights in adjusted]),
}
for name, (lower, upper) in intervals.items():
    inside = np.asarray((lower <= tests.parameters) & (tests.parameters <= upper)).mean(0)
    widths = np.asarray((upper - lower) / highest).mean(0)
    print(f"{name:20s} 80 % intervals hold", np.round(inside, 2), "and are this wide", np.round(widths, 2))
for name, means in errors.items():
    print(f"{name:30s} root mean squared error", np.round(np.sqrt(np.mean(((means - tests.parameters) / spread) ** 2, axis=0)), 3))

# %% [markdown]
# ## The picture
#
# Both posteriors, their atoms in bins by weight. The reference as a line, the truth dashed, 80 % intervals as bars.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
for kind, color, found, reference in (
    ("flat prior", "#0072b2", posterior, references[0]),
    ("arrivals counted at the door", "#d55e00", informed_posterior, references[1]),
):
    low, high = kbr.credible_interval(found, 0.8)
    for i, axis in enumerate(axes):
        bins = np.linspace(0, float(highest[i]), 26)
        mass, _ = np.histogram(found.points[:, i], bins, weights=found.weights, density=True)
        axis.stairs(np.maximum(mass, 0), bins, fill=True, color=color, alpha=0.35, label=kind)
        heights, _ = np.histogram(reference[0][:, i], bins, weights=reference[1], density=True)
        axis.stairs(heights, bins, color=color, linewidth=1.3, label="regression ABC, 100000 calls")
        place = -0.04 if color == "#0072b2" else -0.08
        axis.plot([low[i], high[i]], [place] * 2, color=color, linewidth=4, transform=axis.get_xaxis_transform(), clip_on=False)
for i, axis in enumerate(axes):
    axis.axvline(truth[i], color="black", linestyle="--", linewidth=1, label="truth")
    axis.set_title(names[i], loc="left", fontsize=10)
    axis.set_yticks([])
    axis.tick_params(axis="x", pad=12)
    axis.spines[["top", "right", "left"]].set_visible(False)
axes[0].legend(frameon=False, fontsize=7)
plt.show()
