"""What is read off messages, gradients, stopping, structures of graphs, and bimodal beliefs against
exact ones.
"""

import dataclasses

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest
from helpers import closeness

import kbr_jax as kbr
from benchmarks.depth import bimodal_tree

close = closeness(0.0, 0.0, "atol")


def noisy_pairs(count, n, seed):
    """Pairs in one dimension; two of the points coincide."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        x = rng.normal(size=n)
        x[1] = x[0]
        pairs.append((jnp.asarray(x), jnp.asarray(np.tanh(x) + 0.3 * rng.normal(size=n))))
    return pairs


LEAVES = kbr.propagation.pairwise_graph(
    [[0, 1], [1, 2], [2, 3], [3, 0], [0, 4], [2, 5]],
    edge_types=[0, 0, 0, 0, 1, 1],
    observed_nodes=[4, 5],
)
PATH = kbr.propagation.pairwise_graph(
    [[0, 1], [0, 2], [1, 3]], edge_types=[0, 1, 1], observed_nodes=[2, 3]
)
GRID = jnp.linspace(-2, 2, 9)


@pytest.mark.parametrize("form", ["exact", "features", "pivots"])
def test_gradients_of_a_loss_on_beliefs(form):
    # One graph with loops: what differs between the forms is the message.
    graph, truth = (LEAVES, [0.5, 0.2, -0.4, 0.1]) if form == "exact" else (PATH, [0.5, 0.2])
    pairs, values, truth = noisy_pairs(2, 10, 0), jnp.asarray([0.4, -0.3]), jnp.asarray(truth)
    few = kbr.Landmarks(jnp.linspace(-1.5, 1.5, 5))
    options = {"exact": {}, "features": {"landmarks": few}, "pivots": {"pivots": few}}[form]

    def loss(p):
        kernels = [kbr.Gaussian(p["h"]), kbr.Gaussian(p["c"])]
        model = kbr.propagation.fit_belief_propagation(
            graph, kernels, pairs=pairs, regularizer=p["epsilon"], **options
        )
        messages = kbr.propagation.belief_propagation(
            model, values, num_sweeps=2, damping=0.2, schedule="loopy"
        )
        beliefs = kbr.propagation.beliefs(model, messages, GRID)
        return jnp.mean((beliefs.mean() - truth) ** 2) + jnp.mean(beliefs.median() * truth)

    @jax.jit
    def run(p, directions):
        # One program: the gradient, and the loss on both sides of it along each direction.
        step = 1e-5
        both = jax.tree.map(lambda d: jnp.concatenate([step * d, -step * d]), directions)
        ends = jax.lax.map(lambda d: loss(jax.tree.map(jnp.add, p, d)), both)
        return jax.grad(loss)(p), (ends[:3] - ends[3:]) / (2 * step)

    p = {"h": jnp.asarray(0.7), "c": jnp.asarray(0.6), "epsilon": jnp.asarray([0.02, 0.05])}
    rng = np.random.default_rng(1)
    directions = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=(3, *leaf.shape))), p)
    gradient, differences = run(p, directions)
    products = sum(
        jnp.sum(d.reshape(3, -1) * g.reshape(-1), axis=1)
        for d, g in zip(jax.tree.leaves(directions), jax.tree.leaves(gradient), strict=True)
    )
    assert all(
        np.all(np.isfinite(leaf)) and np.any(leaf != 0) for leaf in jax.tree.leaves(gradient)
    )
    np.testing.assert_allclose(products, differences, rtol=1e-5, atol=1e-8)


def test_estimates_from_a_belief():
    grid = jnp.linspace(-4.0, 6.0, 201)
    heights = np.stack(
        [np.exp(-((np.asarray(grid) - m) ** 2) / (2 * s**2)) for m, s in ((0.5, 0.7), (1.0, 1.2))]
    )
    skewed = np.exp(-np.asarray(grid)) * (np.asarray(grid) > 0)
    probabilities = np.concatenate([heights, skewed[None]])
    probabilities = jnp.asarray(probabilities / probabilities.sum(1, keepdims=True))
    beliefs = kbr.propagation.Beliefs(grid, probabilities, probabilities / 0.05, (0, 1, 2))
    close(beliefs.mean()[:2], [0.5, 1.0], 1e-3)
    close(beliefs.median(), [0.5, 1.0, np.log(2)], 0.025)  # half a cell
    close(beliefs.mode()[:2], [0.5, 1.0], 1e-12)
    draws = np.asarray(beliefs.sample(4000, key=jax.random.key(0)))
    assert draws.shape == (3, 4000)
    close(draws.mean(1), beliefs.mean(), 5 * 1.2 / np.sqrt(4000))
    close(draws[:2].std(1), [0.7, 1.2], 0.06)
    embedding = beliefs.embed(kbr.Gaussian(1.0))
    close(kbr.mean(embedding), beliefs.mean(), 1e-12)
    labels = kbr.propagation.Beliefs(
        jnp.arange(3), jnp.asarray([[0.2, 0.2, 0.6], [0.3, 0.3, 0.4]]), None, (0, 1)
    )
    close(labels.median(), [2, 1], 0)


def test_marginals_given_and_estimated():
    """Without edges the belief is p*.

    By frequencies, by a kernel density, as given, or as the sample itself.
    """
    graph = kbr.propagation.pairwise_graph([], num_nodes=2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=30))
    model = kbr.propagation.fit_belief_propagation(
        graph, kbr.Gaussian(0.5), points=[x, x + 1], regularizer=0.1
    )
    cell_sizes = jnp.asarray(np.linspace(0.1, 0.3, 41))
    grid = jnp.cumsum(cell_sizes) - 4

    @jax.jit
    def read(model):
        messages = kbr.propagation.belief_propagation(model)
        given = kbr.propagation.beliefs(
            model, messages, grid, marginal=jnp.exp(-(grid**2) / 2), cell_sizes=cell_sizes
        )
        estimated = kbr.propagation.beliefs(
            model, messages, grid, marginal=kbr.Laplace(0.4), cell_sizes=cell_sizes
        )
        return given, estimated, kbr.propagation.beliefs(model, messages, node_types=[1])

    given, estimated, own = read(model)
    for beliefs in (given, estimated):
        close(jnp.sum(beliefs.density * cell_sizes, axis=1), 1, 1e-12)
    normal = np.exp(-(np.asarray(grid) ** 2) / 2)
    close(given.density[0], normal / np.sum(normal * cell_sizes), 1e-12)
    laplace = np.exp(-np.abs(np.asarray(grid)[:, None] - np.asarray(x)[None] - 1) / 0.4).sum(1)
    close(estimated.density[1], laplace / np.sum(laplace * cell_sizes), 1e-12)
    close(own.probabilities, 1 / 30, 1e-15)
    close(own.mean(), [np.mean(x) + 1], 1e-12)


def test_sweeps_stop_at_a_tolerance_and_are_exact_on_trees():
    pairs = noisy_pairs(4, 12, 3)
    tree = kbr.propagation.pairwise_graph([[0, 1], [1, 2], [1, 3], [3, 4]], observed_nodes=[4])
    loop = kbr.propagation.pairwise_graph([[0, 1], [1, 2], [2, 0], [2, 3]], observed_nodes=[3])

    @jax.jit
    def run(value):
        model = kbr.propagation.fit_belief_propagation(
            tree, kbr.Gaussian(0.8), pairs=pairs, regularizer=0.05
        )
        exact = kbr.propagation.belief_propagation(model, value, floor=0.01)
        flooded = kbr.propagation.belief_propagation(
            model, value, floor=0.01, num_sweeps=9, tolerance=1e-12, schedule="loopy"
        )
        looped = kbr.propagation.fit_belief_propagation(
            loop, kbr.Gaussian(0.8), pairs=pairs, regularizer=0.05
        )
        full = kbr.propagation.belief_propagation(
            looped, value, num_sweeps=60, tolerance=1e-6, schedule="loopy"
        )
        return exact, flooded, full

    exact, flooded, full = run(jnp.asarray([0.3]))
    real = kbr.propagation._layout.directed_edges(tree)[0]
    assert sum(map(len, real.values())) == 6 == exact.values.shape[0]
    close(flooded.values, exact.values, 1e-12)
    # Diameter 3 among hidden nodes is 2 edges: sweep 3 changes nothing, and none follows.
    assert int(flooded.sweeps) == 3 and np.all(np.asarray(flooded.residuals[2:]) <= 1e-12)
    assert int(full.sweeps) < 60 and float(full.residuals[-1]) <= 1e-6


def test_residuals_see_messages_alone_where_supports_differ_in_size():
    graph = kbr.propagation.pairwise_graph([[0, 1], [1, 2]])
    x = np.random.default_rng(3).normal(size=40)
    pairs = [(x[:12], x[:12] + 1.0), (x + 1.0, x + 2.0)]
    model = kbr.propagation.fit_belief_propagation(
        graph, kbr.Gaussian(1.0), pairs=pairs, regularizer=0.1
    )
    sizes = [12, 52, 40]
    assert [len(model.supports[kind]) for kind in graph.node_types] == sizes
    says = [kbr.propagation.Likelihood([0], lambda s, y: -0.02 * (s - y) ** 2, jnp.zeros(1))]
    first, settled = (
        kbr.propagation.belief_propagation(
            model, likelihoods=says, schedule="loopy", num_sweeps=sweeps
        )
        for sweeps in (1, 3)
    )
    targets = model.layout.message_slots.targets
    real = [first.values[slot, : sizes[target]] for slot, target in enumerate(targets)]
    close(first.residuals, [max(float(jnp.max(jnp.abs(m - 1))) for m in real)], 1e-12)
    close(settled.residuals[2:], [0], 1e-12)


def test_one_template_between_hidden_and_observed_nodes_of_one_kind():
    rng = np.random.default_rng(4)
    a = np.concatenate([np.arange(9) % 3, rng.integers(0, 3, 30)])
    b = np.concatenate([np.arange(9) // 3, (a[9:] + rng.integers(0, 2, 30)) % 3])
    graph = kbr.propagation.pairwise_graph(
        [[0, 1], [1, 2], [2, 3]], edge_types=[0, 0, 0], observed_nodes=[3]
    )

    @jax.jit
    def run(a, b, seen):
        every = kbr.Landmarks(jnp.arange(3))
        options = {"landmarks": every, "landmarks_observed": every, "regularizer": 1e-14}
        model = kbr.propagation.fit_belief_propagation(
            graph, kbr.Delta(), pairs=[(a, b)], **options
        )
        return kbr.propagation.beliefs(
            model,
            kbr.propagation.belief_propagation(model, seen),
            jnp.arange(3),
            marginal=jnp.ones(3),
        ).probabilities

    beliefs = np.asarray(run(jnp.asarray(a), jnp.asarray(b), jnp.asarray([1])))
    table = np.zeros((3, 3))
    np.add.at(table, (a, b), 1 / len(a))
    step = table / table.sum(1, keepdims=True)
    heard = np.eye(3)[1]
    for node in (2, 1, 0):
        heard = step @ heard
        close(beliefs[node], heard / heard.sum(), 1e-10)
    assert graph.num_node_types == 1


def test_evidence_of_different_kinds_multiplies():
    rng = np.random.default_rng(6)
    x = rng.normal(size=15)
    points = [
        jnp.asarray(p)
        for p in (x, np.stack([x, -x], 1) + 0.5 * rng.normal(size=(15, 2)), (x > 0).astype(int))
    ]
    graph = kbr.propagation.pairwise_graph([[0, 1], [0, 2]], observed_nodes=[1, 2])

    @jax.jit
    def run(points):
        kernels = [kbr.Gaussian(0.6), kbr.Gaussian(1.0), kbr.Delta()]
        model = kbr.propagation.fit_belief_propagation(
            graph, kernels, points=points, regularizer=0.02
        )
        seen = (
            {1: jnp.asarray([[0.4, jnp.nan]]), 2: jnp.asarray([1])},
            {1: jnp.asarray([[0.4, -0.2]]), 2: jnp.asarray([1])},
        )
        masks = (jnp.asarray([False, True]), jnp.asarray([True, False]), jnp.asarray([True, True]))
        cases = [seen[0], seen[1], seen[1]]
        return [
            kbr.propagation.beliefs(
                model,
                kbr.propagation.belief_propagation(model, v, observed=m),
                GRID,
                marginal=jnp.ones(9),
            ).probabilities[0]
            for v, m in zip(cases, masks, strict=True)
        ]

    label, vector, both = map(np.asarray, run(points))
    close(both, label * vector / np.sum(label * vector), 1e-12)
    assert np.abs(both - label).max() > 0.05


def test_greedy_landmarks_and_pivots_on_a_vector_domain():
    """Ranks instead of landmarks.

    Vectors; a hub with more neighbors than are multiplied in one expression; float32 data.
    """
    rng = np.random.default_rng(5)
    x = [rng.normal(size=(25, 2)).astype(np.float32)]
    x += [(x[0] + 0.5 * rng.normal(size=(25, 2))).astype(np.float32) for _ in range(11)]
    graph = kbr.propagation.pairwise_graph([[0, i] for i in range(1, 12)], observed_nodes=[11])

    @jax.jit
    def run(points, value):
        results = []
        for options in ({"landmarks": 25}, {"landmarks": 25, "pivots": 25, "order": 2}):
            kernel = kbr.Gaussian(jnp.asarray(1.5, jnp.float32))
            model = kbr.propagation.fit_belief_propagation(
                graph, kernel, points=points, regularizer=0.01, **options
            )
            messages = kbr.propagation.belief_propagation(model, value)
            results.append(kbr.propagation.beliefs(model, messages, points[0]).probabilities)
        return results

    features, pivots = run([jnp.asarray(points) for points in x], jnp.ones((1, 2), jnp.float32))
    assert features.dtype == jnp.float32 and features.shape == (11, 25)
    close(jnp.sum(features, axis=1), 1, 1e-5)
    close(pivots, features, 0.02)


def test_bimodal_beliefs_approach_the_exact_ones():
    cases = bimodal_tree.draw(4, np.random.default_rng(99))[6:].T
    truth = np.stack([bimodal_tree.exact(case) for case in cases])
    close(truth.sum(-1), 1, 1e-12)
    # The signs are undecided until the neighbors speak: some marginals have two modes.
    inside = np.sort(
        truth[:, :, 1:-1] * ((np.diff(truth)[..., :-1] > 0) & (np.diff(truth)[..., 1:] < 0)),
        axis=-1,
    )
    assert np.mean(inside[..., -2] > 0.2 * inside[..., -1]) > 0.2
    errors = [
        bimodal_tree.variation(bimodal_tree.draw(m, np.random.default_rng(1)), cases)
        for m in (60, 2000)
    ]
    assert errors[1] < 0.6 * errors[0] and errors[1] < 0.09


@dataclasses.dataclass
class Nodes:
    """What a networkx graph offers, as far as it is used."""

    nodes: list
    links: list

    def edges(self, data=False):
        return self.links if data else [(a, b) for a, b, _ in self.links]


def test_observed_nodes_may_be_a_generator():
    path = networkx.path_graph(["a", "b", "c"])
    for edges, nodes in ((path, "ac"), ([[0, 1], [1, 2]], [0, 2])):
        graph = kbr.propagation.pairwise_graph(edges, observed_nodes=(node for node in nodes))
        assert list(graph.observed) == [True, False, True]


def test_graphs_of_networkx_are_taken():
    own = [
        ("sky", "tree", {"edge_type": 1}),
        ("tree", "ground", {"edge_type": 0}),
        ("sea", "tree", {"edge_type": 1}),
    ]
    graph = kbr.propagation.pairwise_graph(
        Nodes(["sky", "tree", "ground", "sea"], own), observed_nodes=["ground"]
    )
    assert graph.edges.tolist() == [[0, 1], [1, 2], [3, 1]] and graph.edge_types.tolist() == [
        1,
        0,
        1,
    ]
    assert graph.observed.tolist() == [False, False, True, False] and graph.index("sea") == 3
    assert graph.node_types.tolist() == [0, 1, 2, 0]
    without = kbr.propagation.pairwise_graph(Nodes(["a", "b"], [("a", "b", {})]))
    assert without.num_edge_types == 1 and without == kbr.propagation.pairwise_graph(
        Nodes(["a", "b"], [("a", "b", {})])
    )
    assert kbr.propagation.pairwise_graph(networkx.path_graph(4)).num_nodes == 4


def test_a_fitted_model_is_saved(tmp_path):
    x = jnp.asarray(np.random.default_rng(0).normal(size=6))
    graph = kbr.propagation.pairwise_graph([[0, 1]], observed_nodes=[1])
    model = kbr.propagation.fit_belief_propagation(
        graph, kbr.Gaussian(1.0), points=[x, x], regularizer=0.1
    )
    kbr.save(tmp_path / "model.kbr", model)
    loaded = kbr.load(tmp_path / "model.kbr")
    assert loaded.layout == model.layout and hash(loaded.layout) == hash(model.layout)
    assert jax.tree.structure(loaded) == jax.tree.structure(model)
    np.testing.assert_array_equal(
        kbr.propagation.belief_propagation(loaded, x[:1]).local,
        kbr.propagation.belief_propagation(model, x[:1]).local,
    )


def test_rows_of_a_grid_share_templates():
    graph = kbr.propagation.grid_graph(3, 4)
    assert (
        graph.num_nodes == 24
        and graph.num_edge_types == 3 + 2 + 3
        and len(graph.edges) == 9 + 8 + 12
    )
    inferred = kbr.propagation.pairwise_graph(
        graph.edges, edge_types=graph.edge_types, observed_nodes=range(12, 24)
    )
    assert inferred == graph and hash(inferred) == hash(graph) and graph.num_node_types == 6
    assert kbr.propagation.grid_graph(1, 1, leaves=False).num_edge_types == 0


def test_labels_go_in_and_come_out():
    """Samples, kernels, values and beliefs by the labels of a networkx graph (frictions, 20)."""
    graph = kbr.propagation.pairwise_graph(
        networkx.Graph([("A", "B"), ("B", "C")]), observed_nodes=["C", "A"]
    )
    rng = np.random.default_rng(1)
    b = rng.normal(size=30)
    samples = {"C": jnp.asarray(b + 0.3), "A": jnp.asarray(-b), "B": jnp.asarray(b)}
    kernels = {"B": kbr.Gaussian(0.5), "A": kbr.Gaussian(0.7), "C": kbr.Gaussian(0.9)}
    by_label = kbr.propagation.fit_belief_propagation(
        graph, kernels, points=samples, regularizer=0.1
    )
    in_order = kbr.propagation.fit_belief_propagation(
        graph,
        [kernels[label] for label in "ABC"],
        points=[samples[label] for label in "ABC"],
        regularizer=0.1,
    )
    values = jnp.asarray([0.2, -0.1])  # of A and of C
    messages = kbr.propagation.belief_propagation(by_label, {"C": -0.1, "A": 0.2})
    expected = kbr.propagation.beliefs(
        in_order, kbr.propagation.belief_propagation(in_order, values)
    )
    found = kbr.propagation.beliefs(by_label, messages)
    assert found.nodes == ("B",) and found["B"].probabilities.shape == (1, 30)
    close(found["B"].probabilities, expected.probabilities, 1e-14)
    whole, real = (
        kbr.propagation.belief_propagation(by_label, {"C": value, "A": 0.2}) for value in (1, 1.0)
    )
    close(
        kbr.propagation.beliefs(by_label, whole).mean(),
        kbr.propagation.beliefs(by_label, real).mean(),
        0,
    )
    some = kbr.propagation.belief_propagation(by_label, {"A": 0.2})
    masked = kbr.propagation.belief_propagation(
        in_order, values, observed=jnp.asarray([True, False])
    )
    close(some.local, masked.local, 1e-14)
    known = kbr.propagation.Likelihood(("B",), lambda x, y: -((x - y) ** 2), jnp.ones(1))
    seen = kbr.propagation.belief_propagation(by_label, {}, likelihoods=[known])
    expected = np.exp(-((b - 1) ** 2))
    close(seen.local[0], expected / expected.max(), 1e-12)
    with pytest.raises(KeyError, match="not among the nodes read"):
        found["C"]
    with pytest.raises(ValueError, match="'B', which is no observed node"):
        kbr.propagation.belief_propagation(by_label, {"B": 0.0})
    with pytest.raises(ValueError, match=r"A point of `values\['A'\]` has shape"):
        kbr.propagation.belief_propagation(by_label, {"A": jnp.zeros(2)})
    with pytest.raises(ValueError, match="'D' is not a node"):
        kbr.propagation.belief_propagation(by_label, {"D": 0.0})


def test_kernels_of_none_are_the_defaults_of_each_type():
    graph = kbr.propagation.pairwise_graph([[0, 1], [1, 2]], observed_nodes=[2])
    rng = np.random.default_rng(2)
    first = rng.normal(size=30)
    points = [jnp.asarray(first), jnp.asarray(first[:, None] + [0, 5.0]), jnp.arange(30) % 3]

    def read(kernels):
        model = kbr.propagation.fit_belief_propagation(
            graph, kernels, points=points, regularizer=0.1
        )
        messages = kbr.propagation.belief_propagation(model, jnp.asarray([1]))
        return kbr.propagation.beliefs(model, messages, node_types=[0]).probabilities

    chosen = [kbr.kernels.default_kernel(sample) for sample in points]
    close(read(None), read(chosen), 1e-12)
    close(read([chosen[0], None, None]), read(chosen), 1e-12)


KEY = jax.random.key(0)


def test_beliefs_that_are_nan_are_not_read_off():
    for points, nan in ((jnp.arange(3.0), True), (jnp.arange(3), False)):
        probabilities = jnp.asarray([[0.5, 0.5, 0.0], [jnp.nan] * 3])
        unknown = kbr.propagation.Beliefs(points, probabilities, probabilities, (0, 1))
        for read in (lambda b: b.mode(), lambda b: b.median(), lambda b: b.sample(2, key=KEY)):
            with pytest.raises(ValueError, match="NaN"):
                read(unknown)
            if nan:
                assert np.all(np.isnan(jax.jit(read)(unknown)[1]))
        assert np.isnan(jax.jit(lambda b: b.median())(unknown)[1])


def test_an_observed_node_without_an_edge_says_nothing():
    graph = networkx.Graph([("a", "b")])
    graph.add_node("c")
    x = jnp.asarray(np.random.default_rng(1).normal(size=12))
    for values in ({"b": 0.4}, {"b": 0.4, "c": 1.0}):
        pairwise = kbr.propagation.pairwise_graph(graph, observed_nodes=["b", "c"])
        model = kbr.propagation.fit_belief_propagation(
            pairwise, kbr.Gaussian(1.0), pairs=[(x, x + 0.1)], regularizer=0.1
        )
        messages = kbr.propagation.belief_propagation(model, values)
        found = kbr.propagation.beliefs(model, messages, GRID)["a"].mean()
        assert abs(float(found[0]) - 0.3) < 0.5


def test_labels_have_no_mean():
    beliefs = kbr.propagation.Beliefs(jnp.arange(3), jnp.ones((1, 3)) / 3, None, (0,))
    with pytest.raises(ValueError, match="have no mean"):
        beliefs.mean()
