"""Belief propagation against brute force in NumPy.

Sums over all states, message by message, and closed forms.
"""

import dataclasses
import itertools
from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness

import kbr_jax as kbr

TINY = 1e-14
FLOOR = 1e-3


close = closeness(0.0, 0.0, "atol")


def normalized(values):
    return values / values.sum(-1, keepdims=True)


# A chain of three binary variables whose eight cells were counted; evidence x_2 = 1. The table is
# not Markov: what belief propagation gives is the marginal of the tree model with these pairwise
# tables. Ridges are on K + lam I, 20 pairs.
COUNTS = [3, 1, 2, 2, 1, 1, 1, 9]
CHAIN = {
    0.0: {"m10": ["47/84", "179/252"], 0: ["94/273", "179/273"], 1: ["2/13", "11/13"]},
    0.5: {
        "m10": ["3216/6409", "6184/9425"],
        0: ["6700/19841", "13141/19841"],
        1: ["15138/106229", "91091/106229"],
    },
    5.0: {
        "m10": ["636/2717", "1286/3553"],
        0: ["3604/11963", "8359/11963"],
        1: ["6498/71717", "65219/71717"],
    },
}


def floats(fractions):
    return np.asarray([float(Fraction(text)) for text in fractions])


@jax.jit
def chain_beliefs(points, regularizer):
    graph = kbr.propagation.pairwise_graph([[0, 1], [1, 2]], observed_nodes=[2])
    results = []
    both = kbr.Landmarks(jnp.arange(2))
    for options in ({"landmarks": both}, {"landmarks": both, "pivots": both}, {}):
        model = kbr.propagation.fit_belief_propagation(
            graph, kbr.Delta(), points=points, regularizer=regularizer, **options
        )
        messages = kbr.propagation.belief_propagation(model, jnp.ones(1, int))
        results.append(kbr.propagation.beliefs(model, messages, jnp.arange(2)).probabilities)
    return results


@pytest.mark.parametrize("lam", list(CHAIN))
def test_chain_in_closed_form(lam):
    states = np.repeat(np.asarray(list(itertools.product((0, 1), repeat=3))), COUNTS, axis=0)
    forms = chain_beliefs(
        [jnp.asarray(column) for column in states.T], jnp.asarray(max(lam / 20, TINY))
    )
    # Coefficients of the exact Gram form grow like 1 / lambda: its digits go as lambda does.
    for beliefs, tolerance in zip(forms, (1e-10, 1e-10, 1e-10 if lam else 1e-5), strict=True):
        close(beliefs, [floats(CHAIN[lam][0]), floats(CHAIN[lam][1])], tolerance)
        # Without p* the belief is the message.
        close(
            normalized(np.asarray(beliefs[0]) / [8, 12]),
            normalized(floats(CHAIN[lam]["m10"])),
            tolerance,
        )


def test_one_update_in_closed_form():
    """Algorithm VI once, from given messages.

    Product at the samples, coefficients beta_ts, value at a new point.
    """
    x_t, x_s = jnp.asarray([[0.0], [1.0], [2.5]]), jnp.asarray([[0.2], [0.8], [2.0]])
    beta_ut, beta_ts = (
        jnp.asarray([0.3, -0.2, 0.9]),
        np.asarray([0.21792397523, -0.06512628554, 0.06041554609]),
    )
    gram = np.eye(4)
    gram[:3, 3] = gram[3, :3] = [1.0, 0.5, 0.1]
    kernel = kbr.Gaussian(1.0)
    graph = kbr.propagation.pairwise_graph([[0, 1], [0, 2]], observed_nodes=[2])
    model = kbr.propagation.fit_belief_propagation(
        graph,
        [kernel, kernel, kbr.Precomputed(gram)],
        pairs=[(x_t, x_s), (x_t, jnp.arange(3))],
        regularizer=jnp.asarray(0.1 / 3),
    )

    @jax.jit
    def run(beta):
        given = kbr.propagation.Likelihood(
            [0], lambda x, y: jnp.log(kbr.gram(kernel, x_t, x[None])[:, 0] @ y), beta[None]
        )
        return kbr.propagation.belief_propagation(model, jnp.asarray([3]), likelihoods=[given])

    messages = run(beta_ut)
    points = jnp.asarray([[1.5], [0.2], [0.8], [2.0]])
    belief = kbr.propagation.beliefs(model, messages, points, node_types=[1], marginal=jnp.ones(4))
    expected = np.asarray(kbr.gram(kernel, points, x_s)) @ beta_ts
    close(expected[0], 0.09595274013405146, 1e-10)
    close(belief.probabilities[0], normalized(expected), 1e-9)


# Random trees of labels, exactly.

EDGES = [(0, 1), (1, 2), (1, 3), (3, 4), (3, 5), (6, 7)]  # two components
SIZES = [2, 3, 3, 2, 4, 3, 2, 3]
WATCHED = [2, 5, 6]


def labels(seed, n=60):
    """Dependent labels, every value of every pair present."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(n, 2)) @ rng.normal(size=(2, len(SIZES))) + 0.7 * rng.normal(
        size=(n, len(SIZES))
    )
    columns = [np.argsort(np.argsort(mixed[:, i])) * size // n for i, size in enumerate(SIZES)]
    return [np.concatenate([column, np.arange(12) // period % size]) for column, size, period in
            zip(columns, SIZES, (1, 1, 3, 2, 1, 4, 1, 2), strict=True)]  # fmt: skip


def tables(samples):
    """Relative frequencies of nodes and of edges."""
    nodes = [
        np.bincount(sample, minlength=size) / len(sample)
        for sample, size in zip(samples, SIZES, strict=True)
    ]
    edges = {}
    for a, b in EDGES:
        table = np.zeros((SIZES[a], SIZES[b]))
        np.add.at(table, (samples[a], samples[b]), 1 / len(samples[a]))
        edges[a, b] = table
    return nodes, edges


def summed(samples, evidence, likelihood=None):
    """Marginals by a sum over all states of the tree model."""
    nodes, edges = tables(samples)
    marginals = [np.zeros(size) for size in SIZES]
    for state in itertools.product(*map(range, SIZES)):
        if any(state[node] != value for node, value in evidence.items()):
            continue
        weight = np.prod([nodes[i][value] for i, value in enumerate(state)])
        for (a, b), table in edges.items():
            weight *= table[state[a], state[b]] / (nodes[a][state[a]] * nodes[b][state[b]])
        weight *= 1 if likelihood is None else likelihood(state)
        for marginal, value in zip(marginals, state, strict=True):
            marginal[value] += weight
    return [normalized(marginal) for marginal in marginals]


@jax.jit
def tree_beliefs(samples, values, present):
    graph = kbr.propagation.pairwise_graph(EDGES, num_nodes=8, observed_nodes=WATCHED)
    every = kbr.Landmarks(jnp.arange(4))
    model = kbr.propagation.fit_belief_propagation(
        graph,
        kbr.Delta(),
        points=samples,
        regularizer=TINY,
        landmarks=every,
        landmarks_observed=every,
    )
    known = kbr.propagation.Likelihood(
        [4, 0], lambda x, y: -jnp.log(1 + y + x.astype(y.dtype)), jnp.asarray([0.5, 0.1])
    )

    def read(messages):
        return kbr.propagation.beliefs(model, messages, jnp.arange(4)).probabilities

    everywhere = jax.vmap(
        lambda v: read(kbr.propagation.belief_propagation(model, v, observed=present))
    )(values)
    flooded = kbr.propagation.belief_propagation(
        model, values[0], num_sweeps=4, floor=0.0, observed=present, schedule="loopy"
    )
    return (
        everywhere,
        read(
            kbr.propagation.belief_propagation(
                model, values[0], observed=present, likelihoods=[known]
            )
        ),
        read(flooded),
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_trees_equal_the_sum_over_all_states(seed):
    samples = labels(seed)
    values = np.asarray([[1, 2, 0], [0, 1, 1]])
    hidden = [node for node in range(8) if node not in WATCHED]
    for present in (np.ones(3, bool), np.asarray([True, False, True])):
        batch, with_known, flooded = tree_beliefs(
            [jnp.asarray(s) for s in samples], jnp.asarray(values), present
        )
        cases = [
            {n: v for n, v, there in zip(WATCHED, row, present, strict=True) if there}
            for row in values.tolist()
        ]
        for beliefs, case in zip(batch, cases, strict=True):
            expected = summed(samples, case)
            for belief, node in zip(beliefs, hidden, strict=True):
                close(belief[: SIZES[node]], expected[node], 1e-10)
                close(belief[SIZES[node] :], 0, 1e-10)
        expected = summed(
            samples, cases[0], lambda state: 1 / ((1.5 + state[4]) * (1.1 + state[0]))
        )
        for belief, node in zip(with_known, hidden, strict=True):
            close(belief[: SIZES[node]], expected[node], 1e-10)
        close(flooded, batch[0], 1e-10)


# Message by message, in Gaussian kernels.


def gaussian(a, b, h):
    return np.exp(-((np.asarray(a)[:, None] - np.asarray(b)[None]) ** 2) / (2 * h**2))


def rescale(values, floor):
    return np.maximum(values / values.max(), floor)


@dataclasses.dataclass
class Reference:
    """Algorithm VI as the paper writes it: a dictionary of functions, one Gram matrix for each
    edge.

    `edge type` gives for each directed edge its edge type and which of the pair belongs to source
    and target; `likelihoods` a function of points for each node.
    """

    template: dict
    pairs: list
    likelihoods: dict
    h: float
    lam: float
    floor: float

    def __post_init__(self):
        self.messages = {edge: np.ones_like for edge in self.template}

    def heard(self, node, besides, points):
        total = self.likelihoods[node](points)
        for source, target in self.template:
            if target == node and source != besides:
                total = total * self.messages[source, target](points)
        return total

    def update(self, source, target, anchors):
        template, own, other = self.template[source, target]
        x_t, x_s = self.pairs[template][own], self.pairs[template][other]
        n = len(x_s)
        beta = np.linalg.solve(
            gaussian(x_s, x_s, self.h) + n * self.lam * np.eye(n), self.heard(source, target, x_t)
        )
        top = (gaussian(anchors[target], x_s, self.h) @ beta).max()
        return lambda points: np.maximum(gaussian(points, x_s, self.h) @ beta / top, self.floor)

    def sweep(self, anchors, damping):
        old = dict(self.messages)
        new = {edge: self.update(*edge, anchors) for edge in self.template}

        def mixed(a, b):
            return lambda points: (1 - damping) * a(points) + damping * b(points)

        self.messages = {edge: mixed(new[edge], old[edge]) for edge in new}


GRID_H, GRID_LAM, LEAF_H = 0.7, 0.03, 0.5


def grid_problem(seed=3):
    """A 2 x 3 grid with leaves, a sample for each row's edge type, of different sizes."""
    rng = np.random.default_rng(seed)
    graph = kbr.propagation.grid_graph(2, 3)
    first = [rng.normal(size=n) for n in (9, 7, 8, 10, 9)]
    pairs = [(x, np.sin(x) + 0.4 * rng.normal(size=len(x))) for x in first]
    return graph, pairs, rng.normal(size=6)


def to_jax(pairs):
    return [(jnp.asarray(a), jnp.asarray(b)) for a, b in pairs]


def grid_model(pairs, h=GRID_H, lam=GRID_LAM, **options):
    graph = kbr.propagation.grid_graph(2, 3)
    kernels = [kbr.Gaussian(h)] * 2 + [kbr.Gaussian(LEAF_H)] * 2
    return kbr.propagation.fit_belief_propagation(
        graph, kernels, pairs=pairs, regularizer=lam, **options
    )


POINTS = jnp.linspace(-2, 2, 7)


def test_loopy_messages_equal_the_papers_algorithm():
    graph, pairs, values = grid_problem()
    layouts = []

    @jax.jit
    def run(pairs, values, present):
        model = grid_model(pairs)
        layouts.append(model.layout)
        messages = kbr.propagation.belief_propagation(
            model,
            values,
            num_sweeps=2,
            damping=0.3,
            floor=FLOOR,
            observed=present,
            schedule="loopy",
        )
        ones = jnp.ones(7)
        return (
            model.supports[:2],
            messages,
            kbr.propagation.beliefs(model, messages, POINTS, marginal=ones).probabilities,
        )

    present = np.asarray([True, True, True, False, True, True])
    supports, messages, beliefs = run(to_jax(pairs), jnp.asarray(values), present)
    anchors = {node: np.asarray(supports[node // 3]) for node in range(6)}

    def leaf(node):
        x, u = pairs[3 + node // 3]
        beta = np.linalg.solve(
            gaussian(x, x, GRID_H) + len(x) * GRID_LAM * np.eye(len(x)),
            gaussian(u, values[node : node + 1], LEAF_H)[:, 0],
        )

        def function(points, at=None):
            raw = gaussian(points, x, GRID_H) @ beta
            top = (gaussian(anchors[node] if at is None else at, x, GRID_H) @ beta).max()
            return np.maximum(raw / top, FLOOR) if present[node] else np.ones(len(points))

        return function

    edges = [edge for edge in graph.edges.tolist() if max(edge) < 6]
    leaves = {node: leaf(node) for node in range(6)}
    template = {}
    for (a, b), t in zip(edges, graph.edge_types[: len(edges)].tolist(), strict=True):
        template[a, b], template[b, a] = (t, 0, 1), (t, 1, 0)
    reference = Reference(template, pairs, leaves, GRID_H, GRID_LAM, FLOOR)
    for _ in range(2):
        reference.sweep(anchors, 0.3)
    for source, target, slot in layouts[0].message_slots.entries:
        expected = reference.messages[source, target](anchors[target])
        close(messages.values[slot, : len(expected)], expected, 1e-9)

    # Read at other points: every message once more, scaled and floored there.
    for node, belief in enumerate(np.asarray(beliefs)):
        total = leaves[node](np.asarray(POINTS), np.asarray(POINTS))
        for source, target in reference.template:
            if target == node:
                total = total * reference.update(source, node, {node: np.asarray(POINTS)})(
                    np.asarray(POINTS)
                )
        close(belief, normalized(total), 1e-9)


def test_many_images_by_vmap():
    _, pairs, values = grid_problem()
    images = jnp.asarray(np.stack([values, -values, values**2]))
    present = jnp.asarray(np.random.default_rng(0).uniform(size=(3, 6)) < 0.8)

    model = eqx.filter_jit(lambda pairs: grid_model(pairs, pivots=5))(to_jax(pairs))

    def one(values, present):
        messages = kbr.propagation.belief_propagation(
            model, values, num_sweeps=3, floor=FLOOR, observed=present, schedule="loopy"
        )
        return kbr.propagation.beliefs(model, messages, POINTS).probabilities

    alone = jax.jit(one)
    together = jax.jit(jax.vmap(one))(images, present)
    close(together, np.stack([alone(*image) for image in zip(images, present, strict=True)]), 1e-10)


def test_forms_agree():
    """Features, and pivots, that span the samples give the exact form, up to the ridges that keep
    them solvable.
    """
    rng = np.random.default_rng(2)
    x = rng.uniform(-1.5, 1.5, 20)
    points = [x, np.sin(2 * x) + 0.3 * rng.normal(size=20), rng.normal(size=20)]
    graph = kbr.propagation.pairwise_graph([[0, 1], [0, 2]])

    @jax.jit
    def run(points):
        spread = kbr.Landmarks(jnp.linspace(-2.5, 2.5, 24))
        results = []
        for options in (
            {},
            {"landmarks": spread},
            {"pivots": spread},
            {"landmarks": spread, "pivots": spread},
        ):
            model = kbr.propagation.fit_belief_propagation(
                graph, kbr.Gaussian(0.8), points=points, regularizer=GRID_LAM, **options
            )
            # Positive and smooth: nothing is clipped, and what is interpolated from pivots is near
            # their span.
            seen = kbr.propagation.Likelihood(
                [0, 1], lambda x, y: -((x - y) ** 2) / 2, jnp.asarray([0.3, -0.2])
            )
            messages = kbr.propagation.belief_propagation(model, likelihoods=[seen])
            results.append(kbr.propagation.beliefs(model, messages, POINTS).probabilities)
        return results

    exact, *others = run([jnp.asarray(p) for p in points])
    for form in others:
        close(form, exact, 1e-4)


def discrete_loopy(table, unary, sweeps, damping, floor):
    """Loopy belief propagation on a 4-cycle of labels in probability tables, messages of largest
    value 1.
    """
    p = [table.sum(1), table.sum(0)]
    neighbors = {node: [(node + 1) % 4, (node - 1) % 4] for node in range(4)}
    ones = np.ones(len(unary[0]))
    messages = {(t, s): ones for t in neighbors for s in neighbors[t]}
    for _ in range(sweeps):
        new = {}
        for t, s in messages:
            heard = unary[t] * np.prod([messages[u, t] for u in neighbors[t] if u != s], axis=0)
            # Edges are (0, 1), (1, 2), (2, 3), (3, 0), all of one edge type.
            given = table.T / p[1][:, None] if (t + 1) % 4 == s else table / p[0][:, None]
            new[t, s] = (1 - damping) * rescale(given @ heard, floor) + damping * messages[t, s]
        messages = new
    return [
        normalized(unary[s] * np.prod([messages[u, s] for u in neighbors[s]], axis=0))
        for s in range(4)
    ]


@pytest.mark.parametrize("damping, floor", [(0.0, 0.0), (0.4, 0.05)])
def test_a_cycle_of_labels_equals_discrete_loopy_propagation(damping, floor):
    rng = np.random.default_rng(0)
    a = np.concatenate([np.arange(9) % 3, rng.integers(0, 3, 40)])
    b = np.concatenate([np.arange(9) // 3, (a[9:] + rng.integers(0, 2, 40)) % 3])
    unary = rng.uniform(0.2, 1, (4, 3))
    graph = kbr.propagation.pairwise_graph(
        [[0, 1], [1, 2], [2, 3], [3, 0]], edge_types=[0, 0, 0, 0]
    )

    @jax.jit
    def run(a, b, unary, damping, floor):
        model = kbr.propagation.fit_belief_propagation(
            graph, kbr.Delta(), pairs=[(a, b)], regularizer=1e-16, landmarks=3
        )
        known = kbr.propagation.Likelihood(range(4), lambda x, y: jnp.log(y[x]), unary)
        messages = kbr.propagation.belief_propagation(
            model, num_sweeps=7, damping=damping, floor=floor, likelihoods=[known], schedule="loopy"
        )
        support = kbr.propagation.beliefs(model, messages)
        return support.points, support.probabilities, messages.residuals

    points, beliefs, residuals = run(*map(jnp.asarray, (a, b, unary, damping, floor)))
    table = np.zeros((3, 3))
    np.add.at(table, (a, b), 1 / len(a))
    # On the training sample each label weighs as often as it occurs: divide by that.
    for belief, expected in zip(
        np.asarray(beliefs), discrete_loopy(table, unary, 7, damping, floor), strict=True
    ):
        sums = np.asarray([belief[np.asarray(points) == label].mean() for label in range(3)])
        close(normalized(sums), expected, 1e-12)
    assert graph.num_node_types == 1 and np.all(
        np.asarray(residuals[1:]) <= np.asarray(residuals[:-1]) + 1e-12
    )


def test_a_narrow_likelihood_does_not_underflow():
    """Of standard deviation .003 between points .1 apart: the nearest point has all."""
    grid = jnp.linspace(-1, 1, 21)
    model = kbr.propagation.fit_belief_propagation(
        kbr.propagation.pairwise_graph([[0, 1]]),
        kbr.Gaussian(0.5),
        pairs=[(grid, grid)],
        regularizer=0.1,
    )
    narrow = kbr.propagation.Likelihood(
        [0], lambda x, y: -((x - y) ** 2) / (2 * 0.003**2), jnp.asarray([0.26])
    )
    messages = kbr.propagation.belief_propagation(model, likelihoods=[narrow])
    belief = kbr.propagation.beliefs(model, messages, grid)
    close(belief[0].mean(), [0.3], 1e-9)
    # The product of two is the likelihood of their sum, where each alone is 0.
    two = [
        kbr.propagation.Likelihood(
            [0], lambda x, y: -((x - y) ** 2) / (2 * 0.003**2), jnp.asarray([place])
        )
        for place in (-0.5, 0.7)
    ]
    messages = kbr.propagation.belief_propagation(model, likelihoods=two)
    close(kbr.propagation.beliefs(model, messages, grid)[0].mean(), [0.1], 1e-9)


def test_nodes_of_one_support_are_read_together_under_jit():
    model = kbr.propagation.fit_belief_propagation(
        kbr.propagation.pairwise_graph([[0, 1]], node_types=[0, 1]),
        kbr.Gaussian(0.5),
        points=[jnp.arange(4.0)] * 2,
        regularizer=0.1,
    )

    def read(model):
        messages = kbr.propagation.belief_propagation(model)
        return kbr.propagation.beliefs(model, messages, jnp.arange(4.0)).probabilities

    close(jax.jit(read)(model), read(model), 1e-12)


@pytest.mark.parametrize("kind", [list, np.asarray, jnp.asarray])
def test_samples_of_nodes_as_rows_of_an_array(kind):
    """Rows of a NumPy array are new objects each time: two may have one `id` after another."""
    rng = np.random.default_rng(0)
    rows = np.cumsum(rng.normal(size=(4, 30)), axis=0)
    graph = kbr.propagation.pairwise_graph([(0, 1), (1, 2), (2, 3)], observed_nodes=[3])
    samples = [jnp.asarray(row) for row in rows] if kind is list else kind(rows)
    model = kbr.propagation.fit_belief_propagation(
        graph, kbr.Gaussian(1.0), points=samples, regularizer=1e-3
    )
    for node, sample in enumerate(model.samples):
        np.testing.assert_array_equal(sample, rows[node])
    assert model.width == 30


@pytest.mark.parametrize("nodes", [[(0, 2)], [(0, 1), (0, 2)], ["a", 1], np.asarray([1, 2])])
def test_names_of_nodes_stay_what_they_are(nodes):
    found = kbr.propagation.Likelihood(nodes, lambda x, y: -((x - y) ** 2), jnp.zeros(len(nodes)))
    assert found.nodes == tuple(nodes.tolist() if isinstance(nodes, np.ndarray) else nodes)


def test_nodes_of_two_precisions():
    rng = np.random.default_rng(0)
    x = rng.normal(size=20)
    y = x + 0.3 * rng.normal(size=20)
    z = y + 0.3 * rng.normal(size=20)
    points = [x.astype(np.float32), y, z.astype(np.float32)]
    graph = kbr.propagation.pairwise_graph([(0, 1), (1, 2)], observed_nodes=[2])
    model = kbr.propagation.fit_belief_propagation(
        graph, kbr.Gaussian(0.5), points=points, regularizer=1e-2
    )
    tree, loopy = (
        kbr.propagation.beliefs(
            model,
            kbr.propagation.belief_propagation(model, np.ones(1), schedule=schedule),
            node_types=[0],
        ).probabilities
        for schedule in ("tree", "loopy")
    )
    np.testing.assert_allclose(loopy, tree, atol=2e-4)  # the schedules clip in other places
