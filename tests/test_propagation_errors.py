"""Belief propagation refuses what it cannot do, and says what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr

RNG = np.random.default_rng(0)
X, Y, Z = (jnp.asarray(RNG.normal(size=7), jnp.float32) for _ in range(3))
G = kbr.Gaussian(1.0)
CHAIN = kbr.propagation.pairwise_graph([[0, 1], [1, 2]], observed_nodes=[2])
CYCLE = kbr.propagation.pairwise_graph([[0, 1], [1, 2], [2, 0]])


def fit(graph=CHAIN, kernels=G, points=(X, Y, Z), regularizer=0.1, **options):
    return kbr.propagation.fit_belief_propagation(
        graph, kernels, points=points, regularizer=regularizer, **options
    )


MODEL = fit()
MESSAGES = kbr.propagation.belief_propagation(MODEL, Y[:1], num_sweeps=1, schedule="loopy")
PIVOTS = fit(pivots=3)

CASES = {
    # Graphs.
    "missing node": (
        lambda: kbr.propagation.pairwise_graph([[0, 1], [1, 5]], num_nodes=3),
        r"edges\[1\] = \[1, 5\] leads to a node",
    ),
    "negative node": (
        lambda: kbr.propagation.pairwise_graph([[0, -1]]),
        r"edges\[0\] = \[0, -1\] leads to a node",
    ),
    "edges as columns": (
        lambda: kbr.propagation.pairwise_graph(np.array([[0, 1, 2], [1, 2, 3]])),
        r"`edges` has shape \(2, 3\)",
    ),
    "self": (
        lambda: kbr.propagation.pairwise_graph([[0, 1], [2, 2]]),
        r"edges\[1\] joins node 2 to itself",
    ),
    "twice": (
        lambda: kbr.propagation.pairwise_graph([[0, 1], [1, 0]]),
        r"edge \[0, 1\] is given more than once",
    ),
    "no nodes": (
        lambda: kbr.propagation.pairwise_graph([]),
        "no nodes; give `edges`, or `num_nodes`",
    ),
    "fractions": (lambda: kbr.propagation.pairwise_graph([[0.0, 1.0]]), "`edges` must be integers"),
    "edge types": (
        lambda: kbr.propagation.pairwise_graph([[0, 1]], edge_types=[0, 0]),
        r"`edge_types` has shape \(2,\)",
    ),
    "edge type gap": (
        lambda: kbr.propagation.pairwise_graph([[0, 1]], edge_types=[1]),
        r"`edge_types` must be the numbers 0 \.\. T - 1",
    ),
    "kinds": (
        lambda: kbr.propagation.pairwise_graph([[0, 1]], node_types=[0]),
        r"`node_types` has shape \(1,\)",
    ),
    "mixed kinds": (
        lambda: kbr.propagation.pairwise_graph(
            [[0, 1], [1, 2]], edge_types=[0, 0], node_types=[0, 1, 1]
        ),
        "Edge type 0 has first nodes of several types",
    ),
    "observed": (
        lambda: kbr.propagation.pairwise_graph([[0, 1]], observed_nodes=[2]),
        r"`observed_nodes` must hold nodes 0 \.\. 1",
    ),
    "observed mask": (
        lambda: kbr.propagation.pairwise_graph(
            [[0, 1], [1, 2]], observed_nodes=np.asarray([False, False, True])
        ),
        r"`observed_nodes` must be integers, got bool; of a mask give `np.flatnonzero\(mask\)`",
    ),
    "all observed": (
        lambda: kbr.propagation.pairwise_graph([[0, 1]], observed_nodes=[0, 1]),
        "nothing to infer",
    ),
    "label": (lambda: CHAIN.index("a"), "'a' is not a node"),
    "rows": (lambda: kbr.propagation.grid_graph(0, 3), "`rows` must be an integer >= 1"),
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
        lambda: kbr.propagation.fit_belief_propagation(
            kbr.propagation.pairwise_graph([[0, 1]], num_nodes=3),
            G,
            pairs=[(X, Y)],
            regularizer=0.1,
        ),
        "Node 2 has no sample: it is on no edge",
    ),
    "no pair": (
        lambda: kbr.propagation.fit_belief_propagation(CHAIN, G, pairs=[(X, Y)], regularizer=0.1),
        "`pairs` holds 1 samples",
    ),
    "not a pair": (
        lambda: kbr.propagation.fit_belief_propagation(
            CHAIN, G, pairs=[(X, Y), None], regularizer=0.1
        ),
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
        "`kernels` holds 2; give one kernel, or one for each of 3 node types",
    ),
    "domain": (lambda: fit(kernels=[G, G, kbr.Delta()]), r"`points\[2\]`"),
    "regularizer": (lambda: fit(regularizer=0.0), "`regularizer` must be positive"),
    "regularizers": (
        lambda: fit(regularizer=np.ones(3)),
        r"`regularizer` has shape \(3,\); .* each of 2 edge types",
    ),
    "pivots": (lambda: fit(pivots=0), "`pivots` must be an integer >= 1"),
    "order": (lambda: fit(pivots=2, order=0), "`order` must be an integer >= 1"),
    # Inference.
    "cycle": (
        lambda: kbr.propagation.belief_propagation(fit(CYCLE)),
        "form a cycle.*use `schedule=",
    ),
    "no values": (
        lambda: kbr.propagation.belief_propagation(MODEL, schedule="loopy"),
        "1 observed nodes; give their `values`",
    ),
    "needless values": (
        lambda: kbr.propagation.belief_propagation(fit(CYCLE), Y[:1], schedule="loopy"),
        "has no observed nodes",
    ),
    "number of values": (
        lambda: kbr.propagation.belief_propagation(MODEL, Y[:2]),
        "`values` holds 2 values; .* 1 observed nodes",
    ),
    "shape of values": (
        lambda: kbr.propagation.belief_propagation(MODEL, jnp.ones((1, 2))),
        r"A point of `values` has shape \[\(2,\)\]",
    ),
    "kind of values": (
        lambda: kbr.propagation.belief_propagation(MODEL, {0: Y[:1]}),
        "no sample for the observed nodes of type 2",
    ),
    "nan": (
        lambda: kbr.propagation.belief_propagation(MODEL, jnp.full(1, jnp.nan)),
        "`values` contains NaN .* use a mask",
    ),
    "present": (
        lambda: kbr.propagation.belief_propagation(MODEL, Y[:1], observed=np.ones(2, bool)),
        "`observed` must be a boolean mask",
    ),
    "sweeps": (
        lambda: kbr.propagation.belief_propagation(MODEL, Y[:1], num_sweeps=0, schedule="loopy"),
        "`num_sweeps` must be an integer >= 1",
    ),
    "damping": (
        lambda: kbr.propagation.belief_propagation(MODEL, Y[:1], damping=1.0, schedule="loopy"),
        r"`damping` must be one number in \[0, 1\)",
    ),
    "floor": (
        lambda: kbr.propagation.belief_propagation(MODEL, Y[:1], floor=-0.1, schedule="loopy"),
        r"`floor` must be one number in \[0, 1\)",
    ),
    "likelihood node": (
        lambda: kbr.propagation.belief_propagation(
            MODEL, Y[:1], likelihoods=[kbr.propagation.Likelihood([2], jnp.multiply, Y[:1])]
        ),
        "must be hidden nodes",
    ),
    "likelihood twice": (
        lambda: kbr.propagation.belief_propagation(
            MODEL, Y[:1], likelihoods=[kbr.propagation.Likelihood([0, 0], jnp.multiply, Y[:2])]
        ),
        "each given once",
    ),
    "likelihood data": (
        lambda: kbr.propagation.belief_propagation(
            MODEL, Y[:1], likelihoods=[kbr.propagation.Likelihood([0], jnp.multiply, Y[:2])]
        ),
        "`data` holds 2 values",
    ),
    # Beliefs.
    "kinds read": (
        lambda: kbr.propagation.beliefs(MODEL, MESSAGES, X, node_types=[2]),
        "`node_types` must be among the types of the hidden",
    ),
    "two supports": (
        lambda: kbr.propagation.beliefs(MODEL, MESSAGES),
        "one of the `node_types` at a time, or give `points`",
    ),
    "points": (
        lambda: kbr.propagation.beliefs(MODEL, MESSAGES, jnp.ones((3, 2))),
        "A point of `points` has shape",
    ),
    "marginal": (
        lambda: kbr.propagation.beliefs(MODEL, MESSAGES, X, marginal=np.ones(3)),
        r"`marginal` has shape \(3,\)",
    ),
    "negative marginal": (
        lambda: kbr.propagation.beliefs(MODEL, MESSAGES, X, marginal=-np.ones(7)),
        "must not be negative",
    ),
    "widths": (
        lambda: kbr.propagation.beliefs(MODEL, MESSAGES, X, cell_sizes=np.ones(3)),
        r"`cell_sizes` has shape \(3,\)",
    ),
    "pivots are no sample": (
        lambda: kbr.propagation.beliefs(
            PIVOTS,
            kbr.propagation.belief_propagation(PIVOTS, Y[:1], num_sweeps=1, schedule="loopy"),
        ),
        "give `points` to read beliefs at",
    ),
    "mode of a sample": (
        lambda: kbr.propagation.beliefs(MODEL, MESSAGES, node_types=[0]).mode(),
        "read the beliefs on a grid",
    ),
    "median of vectors": (
        lambda: kbr.propagation.Beliefs(
            jnp.ones((2, 2)), jnp.ones((1, 2)) / 2, None, (0,)
        ).median(),
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
        lambda values: (
            kbr.propagation.beliefs(
                MODEL, kbr.propagation.belief_propagation(MODEL, values), X
            ).probabilities
        )
    )
    assert np.all(np.isfinite(read(Y[:1]))) and np.all(np.isnan(read(jnp.full(1, jnp.nan))))


def test_float32_beliefs_and_gradients_are_finite():
    def loss(bandwidth):
        model = fit(kernels=kbr.Gaussian(bandwidth), points=(X, X, Z), landmarks=4, pivots=4)
        messages = kbr.propagation.belief_propagation(model, Y[:1], observed=jnp.asarray([True]))
        beliefs = kbr.propagation.beliefs(
            model, messages, jnp.linspace(-2, 2, 11, dtype=jnp.float32)
        )
        return jnp.mean(beliefs.mean() ** 2), beliefs.probabilities

    (_, probabilities), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.float32(0.8))
    assert probabilities.dtype == jnp.float32 and np.isfinite(gradient)
    np.testing.assert_allclose(np.sum(probabilities, axis=1), 1, rtol=1e-5)
