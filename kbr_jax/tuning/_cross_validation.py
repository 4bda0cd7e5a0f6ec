"""Cross-validation and grids, each as one compiled program, for those who want the papers'
procedure.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_count, as_points, is_concrete, size, take
from .._typing import Array, Float, Int, Points, PRNGKeyArray, with_numbers


def cross_validate(
    score: Callable[[Any, Any], Any],
    data: Points,
    num_folds: int,
    *,
    key: PRNGKeyArray | None = None,
) -> Any:
    """Mean of a score over k splits of the data, each part held out once.

    **Arguments:**

    - `score(training, held_out)`: fit on the one, measure on the other; both are trees like `data`.
      For a filter, `data` may be a set of sequences `[sequences, T, ...]`.
    - `data`: a tree of arrays with n rows. `num_folds`: k, 2 to n (static). Held-out parts are of n
      // k rows; where k does not divide n, the rows left over are always trained on.
    - `key`: to shuffle the rows; without it parts are stretches of consecutive rows, as time series
      need.

    **Returns:** a scalar (a tree of arrays if the score is one), differentiable. Cost: k calls of
    `score`, one after the other in one program, in the memory of one. Each call compiles; in your
    own `jax.jit` only the first.

    **Raises:** `ValueError` for fewer than two folds, or more than rows.
    """
    data = as_points(data, "data")
    training, held_out = _splits(size(data), as_count(num_folds, "num_folds", data, "data"), key)

    @jax.checkpoint
    def one(split):
        return score(take(data, split[0]), take(data, split[1]))

    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), lax.map(one, (training, held_out)))


def _splits(
    n: int, folds: int, key: PRNGKeyArray | None
) -> tuple[Int[Array, "k t"], Int[Array, "k h"]]:
    if folds < 2:
        raise ValueError("One fold leaves nothing to train on: `num_folds` must be at least 2.")
    held = n // folds
    order = jnp.arange(n) if key is None else jax.random.permutation(key, n)
    parts = np.arange(held * folds).reshape(folds, held)
    rest = np.stack([np.setdiff1d(np.arange(n), part) for part in parts])
    return order[rest], order[parts]


class GridSearchResult(eqx.Module):
    """What `grid_search` found.

    `values` of the loss, an axis for each leaf of the grid; the best `parameters` and their
    `value`.
    """

    values: Float[Array, "..."]
    parameters: Any
    value: Float[Array, ""]

    __repr__ = with_numbers


def _is_row(tree: Any) -> bool:
    """Whether the tree is a list of numbers: candidates of one parameter."""
    return isinstance(tree, list) and all(isinstance(one, (int, float)) for one in tree)


def grid_search(loss: Callable[[Any], Any], grid: Any, *, batch_size: int = 1) -> GridSearchResult:
    """The loss at every combination of candidate values, in one compiled program.

    **Arguments:**

    - `loss(parameters)`, a scalar, bound to its data as for `tune`; `grid`: the tree of
      `parameters` with a vector, or a list of numbers, of candidates at each leaf.
    - `batch_size`: combinations evaluated side by side (static): as many as memory allows on an
      accelerator, 1 on a CPU.

    **Returns:** a `GridSearchResult`. Losses that are not finite never win. Cost: the product of
    the numbers of candidates, times the loss.

    **Raises:** `ValueError` for a grid whose leaves are not vectors, or a loss that is not finite
    anywhere.
    """
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, grid, is_leaf=_is_row))
    if not leaves or any(leaf.ndim != 1 or leaf.shape[0] == 0 for leaf in leaves):
        raise ValueError("`grid` must hold a vector [c] of candidate values for each parameter.")
    shape = tuple(leaf.shape[0] for leaf in leaves)
    index = jnp.unravel_index(jnp.arange(int(np.prod(shape))), shape)
    combinations = [leaf[i] for leaf, i in zip(leaves, index, strict=True)]

    values = _evaluate(
        loss, jax.tree.unflatten(treedef, combinations), as_count(batch_size, "batch_size")
    )
    finite = jnp.where(jnp.isfinite(values), values, jnp.inf)
    best = jnp.argmin(finite)
    if is_concrete(values) and not bool(jnp.isfinite(finite[best])):
        raise ValueError("The loss is not finite anywhere on the grid.")
    parameters = jax.tree.unflatten(treedef, [leaf[best] for leaf in combinations])
    return GridSearchResult(values.reshape(shape), parameters, values[best])


@eqx.filter_jit
def _evaluate(loss: Callable[[Any], Any], parameters: Any, batch: int) -> Float[Array, " c"]:
    return lax.map(loss, parameters, batch_size=batch)
