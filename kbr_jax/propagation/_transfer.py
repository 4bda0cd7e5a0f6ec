r"""The linear map of a message update, in its three forms, stacked over many directions.

With pairs $(x_t^i, x_s^i)$, features $\Phi_s$ of the conditioning sample and the product p of the
messages that t received, a message at points z is kernel ridge regression (S13 eq 30, in values
instead of coefficients):

$$ m_{ts}(z) = \Phi(z) (\Phi_s^\top \Phi_s + n \lambda I)^{-1} \Phi_s^\top p(x_t), $$

for the exact kernel $k(z, x_s) (K_s + n \lambda I)^{-1} p(x_t)$. All inverses meet the target side,
once, when a model is fitted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._numerics import matmul
from .._solves import psd_solve
from .._typing import Array, Float, Int, Point, Points
from ..features import AbstractFeatures, FeatureChoice, Landmarks, fit_features, only_active
from ..kernels import AbstractKernel

#: Up to this many factors a product is one expression; beyond, a loop that rescales at every
#: factor.
_FEW = 8


def product(start: Array, factor: Callable[[Any], Array], table: Any) -> Array:
    """`start` times the factors whose numbers stand in the last axis of a table."""
    if table.shape[-1] <= _FEW:
        for column in range(table.shape[-1]):
            start = start * factor(table[..., column])
        return start

    def step(total, index):
        total = total * factor(index)
        return total / peak(total), None

    return lax.scan(step, start, jnp.moveaxis(jnp.asarray(table), -1, 0))[0]


def rows_or_ones(table: Float[Array, "n q"], index: Any) -> Float[Array, "..."]:
    """Rows of a table, and ones for indices beyond its end, where no message comes."""
    return table.at[index].get(mode="fill", fill_value=1)


def peak(values: Array) -> Array:
    """The largest value of each function where it is positive, else 1."""
    peak = jnp.max(values, axis=-1, keepdims=True)
    return jnp.where(peak > 0, peak, 1)


def rescaled(values: Float[Array, "*b q"], floor: Float[Array, ""]) -> Float[Array, "*b q"]:
    """Functions with largest value 1 and none below the floor.

    One that is positive nowhere says nothing: it becomes 1.
    """
    silent = jnp.max(values, axis=-1, keepdims=True) <= 0  # not so NaN
    return jnp.where(silent, 1, jnp.maximum(values / peak(values), floor))


class Power(AbstractKernel):
    r"""$k(x, y)^q$.

    The kernel of the products of q functions of the RKHS of k, restricted to one point (S13 eq 28).
    """

    kernel: AbstractKernel
    order: int = eqx.field(static=True)

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return self.kernel(x, y) ** self.order

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        """Entry by entry."""
        return self.kernel.gram(x, y) ** self.order

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        """Entry by entry."""
        return self.kernel.diagonal(x) ** self.order

    def check(self, x: Points, name: str) -> None:
        """The domain is that of k."""
        self.kernel.check(x, name)


class Regression(eqx.Module):
    """One direction to be fitted: the conditioning sample, where its messages are wanted, and what
    they are made of.

    `pivots` (points and power kernel of the source) or `watched` (kernel and sample of an observed
    source), or neither.
    """

    kernel: AbstractKernel
    points: Points
    regularizer: Float[Array, ""]
    support: Points
    pivots: tuple[Power, Landmarks, Points] | None = None
    watched: tuple[AbstractKernel, Points] | None = None


class Transfer(eqx.Module):
    """Message updates of G directions.

    A source is a vector of c numbers: the product of messages at the source's sample or at its
    pivots, or the code of an observation. `matrix` turns it into values at the target's support,
    `[G, q, c]`; without pivots and evidence it acts on `features.from_sample` of the source,
    `[G, q, r]`. `right` `[G, c, r]` is what `from_sample` would be of the basis vectors.
    """

    features: AbstractFeatures
    regularizer: Float[Array, "*G"]
    right: Float[Array, "*G c r"] | None
    matrix: Float[Array, "*G q k"]

    def pick(self, index: Int[Array, " H"] | np.ndarray) -> "Transfer":
        """Some of the directions."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    def apply(self, sources: Float[Array, "G w c"]) -> Float[Array, "G w q"]:
        """Messages at the support of their targets.

        2 c q flops each, or 2 (c r + r q) in feature form.
        """
        coordinates = self._contract(sources) if self.right is None else sources
        return matmul(coordinates, jnp.swapaxes(self.matrix, -1, -2))

    def read(self, sources: Float[Array, "G w c"], points: Points) -> Float[Array, "G w p"]:
        """Messages at any points, by the same regression."""
        coordinates = self._contract(sources) if self.right is None else matmul(sources, self.right)

        def one(inputs):
            features, regularizer, code = inputs
            return matmul(code, _left(features, regularizer, points).T)

        return lax.map(one, (self.features, self.regularizer, coordinates))

    def _contract(self, sources: Float[Array, "G w c"]) -> Float[Array, "G w r"]:
        return jax.vmap(lambda features, values: features.from_sample(values))(
            self.features, sources
        )


def _left(
    features: AbstractFeatures, regularizer: Float[Array, ""], points: Points
) -> Float[Array, "q r"]:
    return features.ridge(regularizer).solve(features.coordinates(points).T).T


@eqx.filter_jit
def fit_transfer(
    items: Regression, landmarks: FeatureChoice, watched: FeatureChoice
) -> tuple[Transfer, Any]:
    """Fit stacked directions, one after the other.

    Also the features of observed sources (None for hidden ones).
    """

    def one(item: Regression):
        features = fit_features(item.kernel, item.points, landmarks)
        left = _left(features, item.regularizer, item.support)
        source = None
        if item.watched is not None:
            source = fit_features(*item.watched, watched)
            right = features.from_sample(
                source.to_sample(jnp.eye(source.matrix.shape[1], dtype=source.dtype))
            )
        elif item.pivots is not None:
            right = features.from_sample(interpolation(*item.pivots))
        else:
            return Transfer(features, item.regularizer, None, left), source
        return Transfer(features, item.regularizer, right, matmul(left, right.T)), source

    return lax.map(one, items)


def interpolation(kernel: Power, pivots: Landmarks, points: Points) -> Float[Array, "l m"]:
    """Weights on a sample, from values at the pivots.

    A product of messages lies in the span of the product kernel's pivots.
    """
    active = pivots.active
    matrix = kernel.gram(pivots.points, pivots.points)
    matrix = only_active(matrix, active)
    cross = jnp.where(active[:, None], kernel.gram(pivots.points, points), 0)
    shift = float(jnp.finfo(matrix.dtype).eps) ** 0.5 * lax.stop_gradient(
        jnp.mean(jnp.diagonal(matrix))
    )
    return psd_solve(matrix, cross, shift)


def map_alike(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """`function` of each group of items of the same structure and shapes, stacked.

    Its results, taken apart again, in order.
    """
    results: list[Any] = [None] * len(items)
    for index in alike(items):
        stacked = function(stack([items[i] for i in index]))
        for place, i in enumerate(index):
            results[i] = jax.tree.map(lambda leaf, place=place: leaf[place], stacked)
    return results


def stack(items: Sequence[Any]) -> Any:
    """Items of the same structure and shapes as one, with a new leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *items)


def alike(items: Sequence[Any], marks: Sequence[Any] | None = None) -> list[list[int]]:
    """Indices of items that can be stacked (and have the same mark), group by group."""
    groups: dict[Any, list[int]] = {}
    for index, item in enumerate(items):
        leaves, structure = jax.tree.flatten(item)
        shapes = tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)
        groups.setdefault((structure, shapes, None if marks is None else marks[index]), []).append(
            index
        )
    return list(groups.values())
