r"""Messages between nodes: exact on trees in two passes, by flooding on graphs with loops."""

from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_count, as_fraction, check_choice
from .._typing import Array, ArrayLike, Float, Int, with_numbers
from ._evidence import Evidence, Likelihood, as_evidence, local_factors
from ._layout import padded_table
from ._model import PropagationModel
from ._transfer import Transfer, product, rescaled, rows_or_ones


class Messages(eqx.Module):
    """The messages of one case, as `belief_propagation` leaves them.

    - `values` `[M, q]`: each at the support of the node that it goes to, largest value 1.
    - `local` `[N, q]`: for each hidden node the product of its evidence at its support.
    - `residuals` `[sweeps]`: the largest change of a message in each sweep (0 on trees); `sweeps`:
      how many were done.
    - `floor`, `evidence`: as used, for reading beliefs at other points.
    """

    values: Float[Array, "M q"]
    local: Float[Array, "N q"]
    residuals: Float[Array, " sweeps"]
    sweeps: Int[Array, ""]
    floor: Float[Array, ""]
    evidence: Evidence

    __repr__ = with_numbers


def belief_propagation(
    model: PropagationModel,
    values: Any = None,
    *,
    schedule: Literal["tree", "loopy"] = "tree",
    observed: ArrayLike | None = None,
    likelihoods: Sequence[Likelihood] = (),
    floor: ArrayLike | None = None,
    num_sweeps: int = 10,
    damping: ArrayLike = 0.0,
    tolerance: ArrayLike | None = None,
) -> Messages:
    r"""Send the messages of kernel belief propagation for one case (S13 eqs 27 and 30).

    - `"tree"`: every message is sent once, when all messages that it multiplies are known. This is
      exact. The hidden nodes must form no cycle; observed nodes cut cycles.
    - `"loopy"`: all messages are sent at once, `num_sweeps` times (S13 section 5.1.3). On a tree as
      many sweeps as its diameter are exact.

    **Arguments:**

    - `model`: from `fit_belief_propagation`.
    - `values`: the values of the observed nodes, a sample `[observed, ...]` in the order of their
      numbers. A graph with labels also takes a dict from label to value; labels that the dict
      leaves out are missing. Where points of node types differ, give a dict of one sample for each
      node type. Use `vmap` over it for many cases.
    - `observed`: mask `[observed]`. False: the value is missing, and the node sends no message.
      What stands there is ignored, NaN included. An observed node passes nothing on: where its
      value is missing, the parts of the graph that it joins do not hear of each other. Where values
      may be missing, let the node be hidden, and give its value by a `Likelihood`.
    - `likelihoods`: known likelihoods of hidden nodes.
    - `floor`: messages are kept above this fraction of their largest value. By default 0 on trees
      and 1e-3 on loops. Estimates fall below 0, where no probability is.
    - `num_sweeps` (static), `damping` in [0, 1) (the share of the old message that is kept), and
      `tolerance` (stop when no message changes by more) are for `"loopy"`. On grids 2 to 10 sweeps
      are best: more sharpen beliefs that loops have made too sure.

    **Returns:** `Messages`; read them by `beliefs`. Cost of a message: `fit_belief_propagation`. A
    tree is one compiled loop over its diameter. A sweep is a few batched matrix products.
    Differentiable.

    **Raises:** `ValueError` for an unknown schedule, a cycle with `"tree"`, values that are not of
    the kind of the training sample, and masks of another length. A NaN in an observed value is an
    error too; under `jit` and `vmap` it makes the beliefs NaN.

    **Example:**

    >>> import jax, networkx, kbr_jax as kbr
    >>> graph = kbr.propagation.pairwise_graph(networkx.path_graph(["sun", "heat"]),
    ...                                        observed_nodes=["heat"])
    >>> sun = jax.random.normal(jax.random.key(0), (200,))
    >>> points = {"sun": sun, "heat": sun + 0.1 * jax.random.normal(jax.random.key(1), (200,))}
    >>> model = kbr.propagation.fit_belief_propagation(graph, kbr.Gaussian(0.1), points=points,
    ...                                                regularizer=1e-3)
    >>> messages = kbr.propagation.belief_propagation(model, {"heat": 1.0})
    >>> print(f"{kbr.propagation.beliefs(model, messages)['sun'].mean()[0]:.1f}")
    1.0
    """
    check_choice(schedule, "schedule", "tree", "loopy")
    evidence = as_evidence(model, values, observed, likelihoods)
    tree = schedule == "tree"
    floor = (0.0 if tree else 1e-3) if floor is None else floor
    floor = as_fraction(floor, "floor").astype(model.dtype)
    if tree:
        model.layout.levels  # noqa: B018 - raises for a cycle, outside the compiled program
        return _tree(model, evidence, floor)
    damping = as_fraction(damping, "damping").astype(model.dtype)
    limit = None if tolerance is None else jnp.asarray(tolerance).astype(model.dtype)
    return _flood(model, evidence, as_count(num_sweeps, "num_sweeps"), damping, floor, limit)


@eqx.filter_jit
def _tree(model: PropagationModel, evidence: Evidence, floor: Float[Array, ""]) -> Messages:
    slots, levels = model.layout.message_slots, model.layout.levels
    local = local_factors(model, evidence, floor)
    schedule = [_schedule(block, levels) for block in slots.blocks]

    def send(messages, step):
        for group, (directions, rows) in enumerate(step):
            sent = _outgoing(model, group, directions, rows, messages, local)
            messages = messages.at[rows].set(rescaled(sent, floor), mode="drop")
        return messages, None

    messages = jnp.ones((slots.count, model.width), local.dtype)
    if slots.count:
        messages, _ = lax.scan(send, messages, schedule)
    return Messages(messages, local, jnp.zeros(1, local.dtype), jnp.asarray(1), floor, evidence)


def _schedule(block: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each level the directions that are sent, `[levels, G]`, and their slots.

    The slots are `[levels, G, w]`.

    Filled up with direction 0 and slots beyond the end, which are dropped.
    """
    beyond = len(levels) + 1
    own = levels[block]
    table = []
    for level in range(levels.max(initial=-1) + 1):
        rows = [
            (d, block[d][own[d] == level].tolist())
            for d in range(len(block))
            if np.any(own[d] == level)
        ]
        table.append(rows)
    directions = padded_table([[d for d, _ in rows] for rows in table], 0)
    width = max((len(slots) for rows in table for _, slots in rows), default=0)
    sent = np.full((*directions.shape, width), beyond)
    for level, rows in enumerate(table):
        for place, (_, slots) in enumerate(rows):
            sent[level, place, : len(slots)] = slots
    return directions, sent


@eqx.filter_jit
def _flood(
    model: PropagationModel, evidence: Evidence, sweeps: int, damping, floor, tolerance
) -> Messages:
    slots = model.layout.message_slots
    local = local_factors(model, evidence, floor)
    real = (slots.sources >= 0)[:, None]
    # Supports are of different sizes: what stands beyond them is no message.
    counted = np.zeros((slots.count, model.width), bool)
    for block, transfer in zip(slots.blocks, model.messages, strict=True):
        counted[block, : transfer.matrix.shape[-2]] = True
    counted &= real

    def sweep(old):
        sent = [
            _outgoing(model, group, None, block, old, local).reshape(-1, old.shape[-1])
            for group, block in enumerate(slots.blocks)
        ]
        new = (
            rescaled(sent[0] if len(sent) == 1 else jnp.concatenate(sent), floor) * (1 - damping)
            + damping * old
        )
        new = new if real.all() else jnp.where(real, new, 1)
        return new, jnp.max(jnp.where(counted, jnp.abs(new - old), 0))

    def step(carry, _):
        messages, residual, done = carry
        if tolerance is None:
            messages, residual = sweep(messages)
            return (messages, residual, done + 1), residual
        going = residual > tolerance
        messages, residual = lax.cond(going, sweep, lambda old: (old, residual), messages)
        return (messages, residual, done + going.astype(done.dtype)), residual

    start = jnp.ones((slots.count, model.width), local.dtype)
    if not slots.count:
        return Messages(
            start, local, jnp.zeros(sweeps, local.dtype), jnp.asarray(0), floor, evidence
        )
    carry = (start, jnp.asarray(jnp.inf, local.dtype), jnp.asarray(0))
    (messages, _, done), residuals = lax.scan(step, carry, length=sweeps)
    return Messages(messages, local, residuals, done, floor, evidence)


def _outgoing(
    model: PropagationModel, group: int, directions: Any, rows: Any, messages: Array, local: Array
) -> Array:
    """New messages of a group `[G, w, q]`, from products of other messages."""
    transfer: Transfer = model.messages[group]
    products = sources(model, group, directions, rows, messages, local)
    sent = (transfer if directions is None else transfer.pick(directions)).apply(products)
    sent = sent.astype(messages.dtype)
    return jnp.pad(sent, ((0, 0), (0, 0), (0, messages.shape[-1] - sent.shape[-1])))


def sources(
    model: PropagationModel, group: int, directions: Any, rows: Any, messages: Array, local: Array
) -> Array:
    """Products of messages at the samples (or pivots) of the sources, `[G, w, c]`."""
    slots, transfer = model.layout.message_slots, model.messages[group]
    count = transfer.features.matrix.shape[1] if transfer.right is None else transfer.right.shape[1]
    offsets = np.asarray(model.offsets[group])
    place = np.full(model.graph.num_nodes + 1, len(model.graph.hidden))
    place[model.graph.hidden] = np.arange(len(model.graph.hidden))
    # Beyond the end all is ones: a slot without an edge gets and sends no message.
    received = np.concatenate(
        [model.layout.incoming, np.full((2, model.layout.incoming.shape[1]), slots.count)]
    )
    nodes = place[np.concatenate([slots.sources, [-1, -1]])]
    if isinstance(rows, np.ndarray):
        nodes, received = nodes[rows], received[rows]
    else:
        nodes, received, offsets = (
            jnp.asarray(nodes)[rows],
            jnp.asarray(received)[rows],
            jnp.asarray(offsets)[directions],
        )

    def columns(table, index):
        if not np.any(np.asarray(model.offsets[group])):
            return rows_or_ones(table, index)[..., :count]
        cut = jax.vmap(
            jax.vmap(
                lambda own, start: lax.dynamic_slice(table, (own, start), (1, count))[0], (0, None)
            )
        )
        return jnp.where((index < len(table))[..., None], cut(index, offsets), 1)

    return product(columns(local, nodes), lambda index: columns(messages, index), received)
