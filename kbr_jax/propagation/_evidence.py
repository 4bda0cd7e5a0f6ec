"""What is known of one case: values of observed nodes, and likelihoods given as functions."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import (
    as_mask,
    as_points,
    as_real,
    check_alike,
    check_finite,
    fill,
    is_concrete,
    size,
    take,
)
from .._typing import Array, ArrayLike, Bool, Float, Points
from ..features import AbstractFeatures
from ..kernels import FunctionKernel
from ._graph import PairwiseGraph
from ._model import PropagationModel
from ._transfer import alike, product, rescaled, stack


def _as_function(function: Any) -> FunctionKernel:
    return function if isinstance(function, FunctionKernel) else FunctionKernel(function)


def _as_nodes(nodes: Any) -> tuple[Any, ...]:
    """Names of nodes, which may be tuples or words."""
    return tuple(nodes.tolist() if isinstance(nodes, np.ndarray | jax.Array) else nodes)


class Likelihood(eqx.Module):
    r"""A known likelihood: `log_likelihood(x, y)` is $\log p(y \mid x)$, up to a constant, of a
    hidden node's value x and its datum y.

    - `nodes`: hidden nodes, each once (static). `data`: `[len(nodes), ...]`, the datum of each.

    Array leaves of the log-likelihood (if it is a pytree) and the data stay differentiable.
    """

    nodes: tuple[Any, ...] = eqx.field(static=True, converter=_as_nodes)
    log_likelihood: FunctionKernel = eqx.field(converter=_as_function)
    data: Points


class Evidence(eqx.Module):
    """What is known of a case: values of the observed nodes, which of them are there, and known
    likelihoods.

    `values` holds one sample for each node type, or one of all observed nodes under the name -1.
    """

    values: dict[int, Points]
    present: Bool[Array, " observed"]
    likelihoods: tuple[Likelihood, ...]


def local_factors(
    model: PropagationModel, evidence: Evidence, floor: Float[Array, ""]
) -> Float[Array, "N q"]:
    """The product of all evidence at each hidden node's support."""

    def padded(values):
        return jnp.pad(
            values, ((0, 0),) * (values.ndim - 1) + ((0, model.width - values.shape[-1]),)
        )

    node_types = tuple(model.graph.hidden_node_types.tolist())
    rows = evidence_rows(
        model,
        evidence,
        floor,
        lambda transfer, coordinates: padded(transfer.apply(coordinates)),
        model.width,
        node_types,
    )
    hidden = model.graph.hidden
    table = model.layout.evidence_slots.arrivals(hidden)
    local = product(
        jnp.ones((len(hidden), model.width), rows.dtype), lambda index: rows[index], table
    )
    return local * known_values(
        model, evidence, dict(enumerate(model.supports)), model.width, local.dtype
    )


def evidence_rows(
    model: PropagationModel,
    evidence: Evidence,
    floor: Float[Array, ""],
    send: Any,
    width: int,
    node_types: tuple[int, ...],
) -> Float[Array, "rows q"]:
    """The message of each observed node to each neighbor, and a row of ones.

    It is ones where the value of the node is missing.

    Messages to nodes of other types than the given ones are ones too.
    """
    slots, graph, rows = model.layout.evidence_slots, model.graph, []
    position = np.zeros(graph.num_nodes + 1, int)
    position[:-1][graph.observed] = np.arange(graph.observed.sum())
    for group, block in enumerate(slots.blocks):
        wanted = np.flatnonzero(
            np.isin(graph.node_types[slots.targets[block].max(axis=1)], node_types)
        )
        nodes, values = slots.sources[block[wanted]], jnp.ones((*block.shape, width), model.dtype)
        if len(wanted):
            there = evidence.present[position[nodes]] & (nodes >= 0)
            coordinates = _codes(model, evidence, take(model.observations[group], wanted), nodes)
            sent = rescaled(send(model.evidence[group].pick(wanted), coordinates), floor)
            sent = sent.astype(values.dtype)
            values = values.at[wanted].set(jnp.where(there[..., None], sent, 1))
        rows.append(values.reshape(-1, width))
    return jnp.concatenate([*rows, jnp.ones((1, width), model.dtype)])


def _codes(
    model: PropagationModel, evidence: Evidence, features: AbstractFeatures, nodes: np.ndarray
) -> Float[Array, "G w r"]:
    """Codes of the values of observed nodes `[G, w]`, by the features of their directions."""
    graph = model.graph
    if -1 in evidence.values:
        positions = np.cumsum(graph.observed)[nodes] - 1
        return _encode(features, take(evidence.values[-1], positions))
    node_types = [int(graph.node_types[row[row >= 0][0]]) for row in nodes]
    inside = np.zeros(graph.num_nodes + 1, int)
    for kind in set(node_types):
        members = np.flatnonzero(graph.observed & (graph.node_types == kind))
        inside[members] = np.arange(len(members))
    parts = [
        take(evidence.values[kind], inside[row])
        for kind, row in zip(node_types, nodes, strict=True)
    ]
    return _encode(features, stack(parts))


def _encode(features: AbstractFeatures, points: Points) -> Float[Array, "G w r"]:
    return lax.map(lambda inputs: inputs[0].coordinates(inputs[1]), (features, points))


def known_values(
    model: PropagationModel, evidence: Evidence, supports: dict[int, Points], width: int, dtype: Any
) -> Float[Array, "N p"]:
    """The product of known likelihoods, at the points of each node type."""
    graph = model.graph
    logs = jnp.zeros((len(graph.hidden), width), dtype)
    for known in evidence.likelihoods:
        nodes = np.asarray(known.nodes, int)
        node_types = [
            kind for kind in np.unique(graph.node_types[nodes]).tolist() if kind in supports
        ]
        for group in alike([supports[kind] for kind in node_types]):
            members = [node_types[i] for i in group]
            own = np.flatnonzero(np.isin(graph.node_types[nodes], members))
            place = np.searchsorted(members, graph.node_types[nodes[own]])
            points, data = (
                take(stack([supports[kind] for kind in members]), place),
                take(known.data, own),
            )
            values = jax.vmap(lambda x, y, f=known.log_likelihood: jax.vmap(lambda p: f(p, y))(x))(
                points, data
            )
            values = jnp.pad(
                values.astype(dtype),
                ((0, 0), (0, width - values.shape[1])),
                constant_values=-jnp.inf,
            )
            index = np.full(len(logs), len(own))
            index[np.searchsorted(graph.hidden, nodes[own])] = np.arange(len(own))
            logs = logs + _from_best(values).at[index].get(mode="fill", fill_value=0)
    return jnp.exp(_from_best(logs))


def _from_best(logs: Float[Array, "n w"]) -> Float[Array, "n w"]:
    """Logarithms less the largest of their row, so that not all points underflow."""
    highest = jnp.max(logs, axis=-1, keepdims=True)
    return logs - jnp.where(highest == -jnp.inf, 0, highest)


def as_evidence(
    model: PropagationModel, values: Any, observed: ArrayLike | None, likelihoods: Any
) -> Evidence:
    graph = model.graph
    watched = np.flatnonzero(graph.observed)
    known = tuple(_as_likelihood(graph, likelihood) for likelihood in likelihoods)
    if not len(watched):
        if values is not None:
            raise ValueError(
                "The graph has no observed nodes; name them in "
                "`pairwise_graph(observed_nodes=...)`, or "
                "give no `values`."
            )
        return Evidence({}, jnp.ones(0, bool), known)
    if values is None:
        raise ValueError(
            f"The graph has {len(watched)} observed nodes; give their `values` (missing ones "
            f"masked by `observed`)."
        )
    mask = as_mask(observed, len(watched), "observed")
    if isinstance(values, dict) and graph.labels is not None:
        values, there = _by_label(model, values, watched)
        mask = mask & there
    node_types = graph.node_types[watched]
    names = np.unique(node_types).tolist()
    if isinstance(values, dict):
        missing = [kind for kind in names if kind not in values]
        if missing:
            raise ValueError(f"`values` has no sample for the observed nodes of type {missing[0]}.")
        parts = {
            kind: (
                values[kind],
                np.flatnonzero(node_types == kind),
                [kind],
                "values" if graph.labels is not None else f"values[{kind}]",
            )
            for kind in names
        }
    else:
        parts = {-1: (values, np.arange(len(watched)), names, "values")}
    given = {}
    for name, (sample, own, members, label) in parts.items():
        likes = [(kind, model.samples[kind]) for kind in members if model.samples[kind] is not None]
        sample = as_points(as_real(sample, likes[0][1], label) if likes else sample, label)
        if size(sample) != len(own):
            raise ValueError(
                f"`{label}` holds {size(sample)} values; give one for each of {len(own)} observed "
                f"nodes."
            )
        for kind, like in likes:
            check_alike(sample, label, like, f"training sample of type {kind}")
            model.kernels[kind].check(sample, label)
        given[name] = fill(sample, mask[own], take(likes[0][1], 0)) if likes else sample
        if likes and all(map(is_concrete, jax.tree.leaves(given[name]))):
            check_finite(given[name], label)  # where traced, NaN makes the beliefs NaN
    return Evidence(given, mask, known)


def _by_label(
    model: PropagationModel, values: dict, watched: np.ndarray
) -> tuple[dict[int, Points], np.ndarray]:
    """One sample for each node type from values by label, and their mask."""
    graph = model.graph
    given = {}
    for label, one in values.items():
        node = graph.index(label)
        if node not in watched:
            raise ValueError(f"`values` holds {label!r}, which is no observed node of the graph.")
        kind = int(graph.node_types[node])
        name, like = f"values[{label!r}]", model.samples[kind]
        sample = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], one)
        sample = as_points(sample if like is None else as_real(sample, like, name), name)
        if like is not None:
            check_alike(sample, name, like, f"training sample of type {kind}")
        given[node] = take(sample, 0)
    samples = {}
    for kind in np.unique(graph.node_types[watched]).tolist():
        own = watched[graph.node_types[watched] == kind].tolist()
        known = [given[node] for node in own if node in given]
        if model.samples[kind] is not None:
            filler = take(model.samples[kind], 0)
        else:  # no edge: what stands there is not looked at
            filler = known[0] if known else jnp.zeros(())
        samples[kind] = stack([given.get(node, filler) for node in own])
    return samples, np.isin(watched, list(given))


def _as_likelihood(graph: PairwiseGraph, likelihood: Likelihood) -> Likelihood:
    nodes = np.asarray([graph.index(node) for node in likelihood.nodes], int)
    if not len(nodes) or len(set(likelihood.nodes)) != len(nodes):
        raise ValueError("The nodes of a `Likelihood` must be at least one, each given once.")
    if graph.observed[nodes].any():
        raise ValueError(
            f"The nodes of a `Likelihood` must be hidden nodes of the graph, got "
            f"{list(likelihood.nodes)}."
        )
    data = as_points(likelihood.data, "data")
    if size(data) != len(nodes):
        raise ValueError(
            f"`data` holds {size(data)} values; give one for each of the likelihood's {len(nodes)} "
            f"nodes."
        )
    return Likelihood(tuple(nodes.tolist()), likelihood.log_likelihood, data)
