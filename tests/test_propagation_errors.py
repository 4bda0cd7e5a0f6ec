"""Belief propagation refuses what it cannot do, and says what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr

RNG = np.random.default_rng(0)
X, Y, Z = (jnp.asarray(RNG.normal(size=7), jnp.float32) for _ in range(3))
G = kbr.Gaussian(1.0)
CHAIN = kbr.pairwise_graph([[0, 1], [1, 2]], observed=[2])
CYCLE = kbr.pairwise_graph([[0, 1], [1, 2], [2, 0]])


def fit(graph=CHAIN, kernels=G, points=(X, Y, Z), regularizer=0.1, **options):
    return kbr.fit_belief_propagation(
        graph, kernels, points=points, regularizer=regularizer, **options
    )


MODEL = fit()
MESSAGES = kbr.propagate_loopy(MODEL, Y[:1], sweeps=1)
PIVOTS = fit(pivots=3)

CASES = {
    # Graphs.
    "missing node": (
        lambda: kbr.pairwise_graph([[0, 1], [1, 5]], num_nodes=3),
        r"edges\[1\] = \[1, 5\] leads to a node",
    ),
    "negative node": (
        lambda: kbr.pairwise_graph([[0, -1]]),
        r"edges\[0\] = \[0, -1\] leads to a node",
    ),
    "self": (lambda: kbr.pairwise_graph([[0, 1], [2, 2]]), r"edges\[1\] joins node 2 to itself"),
    "twice": (
        lambda: kbr.pairwise_graph([[0, 1], [1, 0]]),
        r"edge \[0, 1\] is given more than once",
    ),
    "no nodes": (lambda: kbr.pairwise_graph([]), "no nodes; give `edges`, or `num_nodes`"),
    "fractions": (lambda: kbr.pairwise_graph([[0.0, 1.0]]), "`edges` must be integers"),
    "templates": (
        lambda: kbr.pairwise_graph([[0, 1]], templates=[0, 0]),
        r"`templates` has shape \(2,\)",
    ),
    "template gap": (
        lambda: kbr.pairwise_graph([[0, 1]], templates=[1]),
        r"`templates` must be the numbers 0 \.\. T - 1",
    ),
    "kinds": (lambda: kbr.pairwise_graph([[0, 1]], kinds=[0]), r"`kinds` has shape \(1,\)"),
    "mixed kinds": (
        lambda: kbr.pairwise_graph([[0, 1], [1, 2]], templates=[0, 0], kinds=[0, 1, 1]),
        "Template 0 has first nodes of several kinds",
    ),
    "observed": (
        lambda: kbr.pairwise_graph([[0, 1]], observed=[2]),
        r"`observed` must hold nodes 0 \.\. 1",
    ),
    "observed mask": (
        lambda: kbr.pairwise_graph([[0, 1], [1, 2]], observed=np.asarray([False, False, True])),
        r"`observed` must be integers, got bool; of a mask give `np.flatnonzero\(mask\)`",
    ),
    "all observed": (lambda: kbr.pairwise_graph([[0, 1]], observed=[0, 1]), "nothing to infer"),
    "label": (lambda: CHAIN.index("a"), "no labels"),
    "rows": (lambda: kbr.grid_graph(0, 3), "`rows` must be an integer >= 1"),
    # Samples.
    "no sample of a node": (
        lambda: fit(points=(X, None, Z)),
        r"Node 1 has no sample: points\[1\] is None",
    ),
    "too few samples": (
        lambda: fit(points=(X, Y)),
        "`points` holds 2 samples; give one for each of 3 nodes",
    ),
    "node without edge": (
        lambda: kbr.fit_belief_propagation(
            kbr.pairwise_graph([[0, 1]], num_nodes=3), G, pairs=[(X, Y)], regularizer=0.1
        ),
        "Node 2 has no sample: it is on no edge",
    ),
    "no pair": (
        lambda: kbr.fit_belief_propagation(CHAIN, G, pairs=[(X, Y)], regularizer=0.1),
        "`pairs` holds 1 samples",
    ),
    "not a pair": (
        lambda: kbr.fit_belief_propagation(CHAIN, G, pairs=[(X, Y), None], regularizer=0.1),
        r"pairs\[1\] must be a pair of samples",
    ),
    "both": (lambda: fit(pairs=[(X, Y)]), "either `pairs` .* or `points`"),
    "unpaired": (
        lambda: fit(points=(X, Y[:3], Z)),
        r"`points\[1\]` has 3 points and `points\[0\]` 7",
    ),
    "not finite": (lambda: fit(points=(X, Y.at[2].set(jnp.nan), Z)), r"`points\[1\]` contains NaN"),
    "kernels": (
        lambda: fit(kernels=[G, G]),
        "`kernels` holds 2; give one kernel, or one for each of 3 kinds",
    ),
    "domain": (lambda: fit(kernels=[G, G, kbr.Delta()]), r"`points\[2\]`"),
    "regularizer": (lambda: fit(regularizer=0.0), "`regularizer` must be positive"),
    "regularizers": (
        lambda: fit(regularizer=np.ones(3)),
        r"`regularizer` has shape \(3,\); .* each of 2 templates",
    ),
    "pivots": (lambda: fit(pivots=0), "`pivots` must be an integer >= 1"),
    "order": (lambda: fit(pivots=2, order=0), "`order` must be an integer >= 1"),
    # Inference.
    "cycle": (lambda: kbr.propagate_tree(fit(CYCLE)), "form a cycle.*use `propagate_loopy`"),
    "no values": (lambda: kbr.propagate_loopy(MODEL), "1 observed nodes; give their `values`"),
    "needless values": (lambda: kbr.propagate_loopy(fit(CYCLE), Y[:1]), "has no observed nodes"),
    "number of values": (
        lambda: kbr.propagate_tree(MODEL, Y[:2]),
        "`values` holds 2 values; .* 1 observed nodes",
    ),
    "shape of values": (
        lambda: kbr.propagate_tree(MODEL, jnp.ones((1, 2))),
        r"A point of `values` has shape \[\(2,\)\]",
    ),
    "kind of values": (
        lambda: kbr.propagate_tree(MODEL, {0: Y[:1]}),
        "no sample for the observed nodes of kind 2",
    ),
    "nan": (
        lambda: kbr.propagate_tree(MODEL, jnp.full(1, jnp.nan)),
        "`values` contains NaN .* use a mask",
    ),
    "present": (
        lambda: kbr.propagate_tree(MODEL, Y[:1], present=np.ones(2, bool)),
        "`present` must be a boolean mask",
    ),
    "sweeps": (
        lambda: kbr.propagate_loopy(MODEL, Y[:1], sweeps=0),
        "`sweeps` must be an integer >= 1",
    ),
    "damping": (
        lambda: kbr.propagate_loopy(MODEL, Y[:1], damping=1.0),
        r"`damping` must be one number in \[0, 1\)",
    ),
    "floor": (
        lambda: kbr.propagate_loopy(MODEL, Y[:1], floor=-0.1),
        r"`floor` must be one number in \[0, 1\)",
    ),
    "likelihood node": (
        lambda: kbr.propagate_tree(
            MODEL, Y[:1], likelihoods=[kbr.Likelihood([2], jnp.multiply, Y[:1])]
        ),
        "must be hidden nodes",
    ),
    "likelihood twice": (
        lambda: kbr.propagate_tree(
            MODEL, Y[:1], likelihoods=[kbr.Likelihood([0, 0], jnp.multiply, Y[:2])]
        ),
        "each given once",
    ),
    "likelihood data": (
        lambda: kbr.propagate_tree(
            MODEL, Y[:1], likelihoods=[kbr.Likelihood([0], jnp.multiply, Y[:2])]
        ),
        "`data` holds 2 values",
    ),
    # Beliefs.
    "kinds read": (
        lambda: kbr.read_beliefs(MODEL, MESSAGES, X, kinds=[2]),
        "`kinds` must be among the kinds of hidden",
    ),
    "two supports": (
        lambda: kbr.read_beliefs(MODEL, MESSAGES),
        "one of the `kinds` at a time, or give `points`",
    ),
    "points": (
        lambda: kbr.read_beliefs(MODEL, MESSAGES, jnp.ones((3, 2))),
        "A point of `points` has shape",
    ),
    "marginal": (
        lambda: kbr.read_beliefs(MODEL, MESSAGES, X, marginal=np.ones(3)),
        r"`marginal` has shape \(3,\)",
    ),
    "negative marginal": (
        lambda: kbr.read_beliefs(MODEL, MESSAGES, X, marginal=-np.ones(7)),
        "must not be negative",
    ),
    "widths": (
        lambda: kbr.read_beliefs(MODEL, MESSAGES, X, widths=np.ones(3)),
        r"`widths` has shape \(3,\)",
    ),
    "pivots are no sample": (
        lambda: kbr.read_beliefs(PIVOTS, kbr.propagate_loopy(PIVOTS, Y[:1], sweeps=1)),
        "give `points` to read beliefs at",
    ),
    "mode of a sample": (
        lambda: kbr.read_beliefs(MODEL, MESSAGES, kinds=[0]).mode(),
        "read the beliefs on a grid",
    ),
    "median of vectors": (
        lambda: kbr.Beliefs(jnp.ones((2, 2)), jnp.ones((1, 2)) / 2, None, (0,)).median(),
        "A median needs points of one coordinate",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_bad_input(name):
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_nan_in_a_traced_value_is_nan_in_the_beliefs():
    read = jax.jit(
        lambda values: kbr.read_beliefs(MODEL, kbr.propagate_tree(MODEL, values), X).probabilities
    )
    assert np.all(np.isfinite(read(Y[:1]))) and np.all(np.isnan(read(jnp.full(1, jnp.nan))))


def test_float32_beliefs_and_gradients_are_finite():
    def loss(bandwidth):
        model = fit(kernels=kbr.Gaussian(bandwidth), points=(X, X, Z), landmarks=4, pivots=4)
        messages = kbr.propagate_tree(model, Y[:1], present=jnp.asarray([True]))
        beliefs = kbr.read_beliefs(model, messages, jnp.linspace(-2, 2, 11, dtype=jnp.float32))
        return jnp.mean(beliefs.mean() ** 2), beliefs.probabilities

    (_, probabilities), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.float32(0.8))
    assert probabilities.dtype == jnp.float32 and np.isfinite(gradient)
    np.testing.assert_allclose(np.sum(probabilities, axis=1), 1, rtol=1e-5)
