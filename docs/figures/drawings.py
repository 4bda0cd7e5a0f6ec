"""The drawings of the concepts page, and the decision picture.

python docs/figures/drawings.py
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import kbr_jax as kbr
from kbr_jax import plotting

FOLDER = pathlib.Path(__file__).parent
BLUE, ORANGE, GREEN, GRAY = "#0072b2", "#d55e00", "#009e73", "0.55"


def keep(figure, name):
    figure.savefig(FOLDER / f"{name}.png", dpi=90)
    plt.close(figure)


def embedding():
    rng = np.random.default_rng(1)
    points = jnp.asarray(np.r_[rng.normal(-1, 0.4, 12), rng.normal(1.2, 0.5, 8)])
    weights = jnp.asarray(rng.dirichlet(np.full(20, 3.0)))
    figure, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
    line = jnp.linspace(-3, 3, 300)
    plotting.plot_embedding(kbr.Embedding(kbr.Gaussian(0.4), points, weights), line, axis=axis)
    axis.set(xlabel="x", title="20 points with weights (stems), and the function they stand for")
    keep(figure, "concepts-embedding")


def branches(n=250):
    rng = np.random.default_rng(2)
    x = rng.uniform(-2, 2, size=n)
    side = np.where(rng.random(n) < 0.5, 1, -1)
    y = side * np.maximum(0.0, x + 0.5) + 0.15 * rng.normal(size=n)
    return jnp.asarray(x)[:, None], jnp.asarray(y)


def condition():
    x, y = branches()
    model = kbr.fit_conditional(kbr.Gaussian(0.3), kbr.Gaussian(0.25), x, y, regularizer=1e-3)
    given = kbr.condition(model, jnp.array([1.0]))
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.9), layout="constrained")
    axes[0].plot(x[:, 0], y, ".", color=GRAY)
    axes[0].axvline(1.0, color=ORANGE)
    axes[0].set(title="pairs; what is y at x = 1?", xlabel="x", ylabel="y")
    size = 600 * np.abs(np.asarray(given.weights))
    axes[1].scatter(x[:, 0], y, s=size, color=BLUE, alpha=0.7)
    axes[1].axvline(1.0, color=ORANGE)
    axes[1].set(title="weights of the pairs", xlabel="x")
    line = jnp.linspace(-2.5, 2.5, 200)
    axes[2].plot(kbr.evaluate(given, line), line, color=BLUE)
    axes[2].set(title="embedding of P(Y | X = 1)", xlabel="$\\mu(y)$")
    keep(figure, "concepts-condition")


def bayes():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.uniform(-2, 2, size=(400, 1)))
    y = x[:, 0] ** 2 + 0.15 * jnp.asarray(rng.normal(size=400))
    kernel = kbr.Gaussian(0.25)
    model = kbr.fit_conditional(kernel, kbr.Gaussian(0.3), x, y, regularizer=1e-4)
    prior = kbr.embed(kernel, jnp.asarray(rng.normal(0.7, 0.6, size=(300, 1))).clip(-2, 2))
    posterior = kbr.bayes_rule(model, prior, 1.0, regularizer=1e-5)
    line = jnp.linspace(-2, 2, 200)[:, None]
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.9), layout="constrained", sharex=True)
    axes[0].plot(line, kbr.evaluate(prior, line), color=GREEN)
    axes[0].set(title="prior of x", xlabel="x")
    axes[1].plot(x[:, 0], y, ".", color=GRAY, markersize=3)
    axes[1].axhline(1.0, color=ORANGE)
    axes[1].set(title="pairs are the likelihood; y = 1 is seen", xlabel="x", ylabel="y")
    axes[2].plot(line, kbr.evaluate(posterior, line), color=BLUE)
    axes[2].set(title="posterior: 1, and not -1", xlabel="x")
    keep(figure, "concepts-bayes")


def box(axis, x, y, text, color, width=2.0, height=0.7):
    axis.add_patch(
        plt.Rectangle(
            (x - width / 2, y - height / 2),
            width,
            height,
            facecolor=color,
            alpha=0.18,
            edgecolor=color,
        )
    )
    axis.text(x, y, text, ha="center", va="center", fontsize=9)


def arrow(axis, start, end, text="", below=False):
    axis.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "0.3"})
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + (-0.28 if below else 0.18)
    axis.text(*middle, text, ha="center", fontsize=8, color="0.3")


def filtering():
    figure, axis = plt.subplots(figsize=(9, 2.4), layout="constrained")
    axis.set(xlim=(0, 12), ylim=(-1.6, 1.2))
    axis.axis("off")
    box(axis, 1.4, 0, "belief\nP(s | o until t)", BLUE)
    box(axis, 6.0, 0, "prediction\nP(s' | o until t)", GREEN)
    box(axis, 10.6, 0, "belief\nP(s' | o until t+1)", BLUE)
    arrow(axis, (2.4, 0), (5.0, 0), "sum rule")
    arrow(axis, (7.0, 0), (9.6, 0), "Bayes' rule")
    arrow(axis, (8.3, -1.15), (8.3, -0.1))
    axis.text(8.3, -1.4, "observation", ha="center", fontsize=9, color=ORANGE)
    axis.text(3.7, -0.55, "pairs (s, s')", ha="center", fontsize=8, color="0.3")
    axis.text(9.0, 0.75, "pairs (s, o)", ha="center", fontsize=8, color="0.3")
    keep(figure, "concepts-filter")


def which_method():
    rows = [
        (
            "recordings in time:\nstates and observations",
            "the state from\nnew observations",
            "learn_filter, run_filter",
        ),
        ("pairs (x, y)", "y at a new x", "learn_conditional"),
        ("pairs (x, y), y real", "intervals, quantiles,\na density of y", "learn_forecast"),
        ("pairs (x, y)\nand a prior of x", "x given y", "learn_posterior"),
        ("a simulator", "its parameters\ngiven data", "simulate, learn_conditional"),
        (
            "two samples,\nor pairs",
            "is there a difference,\na dependence?",
            "two_sample_test,\nindependence_test",
        ),
        ("triples (x, y, z)", "a dependence\ngiven z?", "conditional_independence_test"),
        ("points, a log density", "is it their density?", "goodness_of_fit_test"),
        (
            "doses, outcomes, what\ndrives both or an instrument",
            "y if the dose were set",
            "intervene, fit_instrument",
        ),
        ("a treatment, outcomes,\ncovariates", "does it change them?", "treatment_effect_test"),
        ("a series, a stream", "where it changes", "change_points,\ndetect_changes"),
        ("samples at\nsuccessive times", "the next sample", "fit_dynamics, extrapolate"),
        ("a graph, and pairs\nof neighbors", "each node,\ngiven some", "fit_belief_propagation"),
    ]
    figure, axis = plt.subplots(figsize=(9, 0.9 * len(rows) + 0.7), layout="constrained")
    axis.set(xlim=(0, 12), ylim=(-len(rows) + 0.4, 1.2))
    axis.axis("off")
    for x, title in ((1.9, "what you have"), (6.0, "what you want"), (10.1, "what you call")):
        axis.text(x, 0.85, title, ha="center", fontsize=11, weight="bold")
    for row, (have, want, call) in enumerate(rows):
        box(axis, 1.9, -row, have, GREEN, 3.2, 0.74)
        box(axis, 6.0, -row, want, ORANGE, 3.2, 0.74)
        box(axis, 10.1, -row, call, BLUE, 3.4, 0.74)
        arrow(axis, (3.5, -row), (4.4, -row))
        arrow(axis, (7.6, -row), (8.4, -row))
    keep(figure, "which-method")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for draw in (embedding, condition, bayes, filtering, which_method):
        draw()
