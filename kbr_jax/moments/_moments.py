r"""Sums over a sample that hold all that rules and filters need of it.

With features $\phi$ of x and $\psi$ of y, every rule meets the n training pairs only through

$$ w_i = b(x_i)^\top c, \qquad \beta_i = (b(x_i)^\top c) \, (\tilde\psi(y_i)^\top u), \qquad
   \tilde\psi = (\psi, 1), $$

and needs of them only the sums $\sum_i w_i \psi_i \psi_i^\top$ and $\sum_i \beta_i z_i$ for some z.
Both are contractions of tensors that are sums over the sample. The basis b is $(\phi, 1)$, which is
exact and has weights of any sign. Or it is a partition of unity (`PartitionOfUnity`), which is
exact where w is constant over a cell. Its weights are non-negative wherever c is: they can be
clipped, truncated, and used as importance weights.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_alike, in_precision, precision_of, take
from .._numerics import matmul, safe_divide
from .._typing import Array, Float, Point, PointFunction, Points
from ..features import (
    AbstractFeatureMap,
    Landmarks,
    PartitionOfUnity,
    RandomFourier,
    fourier_features,
    landmark_features,
)
from ..kernels import AbstractKernel, KernelLike, as_kernel


def ravel_point(point: Point) -> Float[Array, " e"]:
    """All numbers of a point as one real vector: the default of what moments average."""
    dtype = precision_of(point) or jnp.zeros(0).dtype
    return jnp.concatenate([jnp.ravel(leaf).astype(dtype) for leaf in jax.tree.leaves(point)])


class MomentMaps(eqx.Module):
    r"""The functions whose products are averaged. Build it with `moment_maps`.

    - `x`, `y`: feature maps $\phi$ `[p]` and $\psi$ `[q]`;
    - `cells`: the basis b `[K]` if it is a partition of unity, else None and $b = (\phi, 1)$;
    - `function`: f of one point x, with values `[e]`, whose expectations are wanted exactly.
    """

    x: AbstractFeatureMap
    y: AbstractFeatureMap
    cells: PartitionOfUnity | None
    function: PointFunction = eqx.field(static=True)
    embedding: bool = eqx.field(static=True)
    shift: bool = eqx.field(static=True)

    @property
    def origin(self) -> Float[Array, " e"]:
        """The values of f at one landmark. Far from 0, sums of f less these keep their digits."""
        value = jnp.asarray(self.function(take(self.x.points, 0))).astype(self.x.dtype)
        return lax.stop_gradient(jnp.where(jnp.isfinite(value), value, 0)).reshape(-1)

    def basis(self, coordinates: Float[Array, "m p"], x: Points) -> Float[Array, "m K"]:
        """The basis at points with the given coordinates."""
        if self.cells is not None:
            return self.cells.assign(x).astype(coordinates.dtype)
        return jnp.concatenate([coordinates, jnp.ones_like(coordinates[:, :1])], axis=1)


class Moments(eqx.Module):
    r"""Sums over n training pairs (x, y). A filter adds the successor $x^+$ of each x.

    - `count`: n; `covariance`: $\sum \phi \phi^\top$;
    - `likelihood`: $\sum b \otimes \psi \otimes \psi$, each entry of the symmetric part once;
    - `readout`: $\sum b \otimes \tilde\psi \otimes (f - f_0, 1)$, $f_0$ the value at a landmark;
    - `embedding`: $\sum b \otimes \tilde\psi \otimes \phi$, where kept;
    - `transition`: $\sum b \otimes \tilde\psi \otimes \phi^+$, where kept.

    Add two with `merge_moments`. Memory O(K q^2 + K q p), whatever n is.
    """

    maps: MomentMaps
    count: Float[Array, ""]
    covariance: Float[Array, "p p"]
    likelihood: Float[Array, "K t"]
    readout: Float[Array, "K q1 e1"]
    embedding: Float[Array, "K q1 p"] | None
    transition: Float[Array, "K q1 p"] | None

    @property
    def mass(self) -> Float[Array, " K"]:
        r"""$\sum_i b(x_i)$: how much each basis function holds of the sample."""
        return self.readout[:, -1, -1]

    @property
    def constant(self) -> Float[Array, " K"]:
        """Coefficients of the basis whose sum is the function 1."""
        ones = jnp.ones_like(self.mass)
        return ones if self.maps.cells is not None else jnp.zeros_like(ones).at[-1].set(1)

    @property
    def uniform(self) -> Float[Array, " K"]:
        """Coefficients of the weights 1 / n, 0 without a sample."""
        return self.constant * safe_divide(jnp.ones_like(self.count), self.count)

    @property
    def pairs(self) -> Float[Array, "p q"]:
        r"""$\sum_i \phi(x_i) \psi(y_i)^\top$."""
        if self.maps.cells is None:
            return self.readout[:-1, :-1, -1]
        # The basis sums to 1.
        return jnp.sum(kept(self.embedding, "embedding"), axis=0)[:-1].T

    def operator(self, coefficients: Float[Array, "*b K"]) -> Float[Array, "*b q q"]:
        r"""$\sum_i w_i \psi_i \psi_i^\top$ for $w_i = b(x_i)^\top c$; cost O(K q^2)."""
        return _unpack(matmul(coefficients, self.likelihood), self.maps.y.matrix.shape[1])


def kept(tensor: Array | None, name: str) -> Array:
    """A part of the moments that may have been left out."""
    if tensor is None:
        raise ValueError(
            f"These moments lack `{name}`, which is needed here: collect them with maps that keep "
            "it (`moment_maps(..., embedding=True, shift=True)`)."
        )
    return tensor


def contract(
    tensor: Float[Array, "K q1 s"],
    coefficients: Float[Array, "*#b K"],
    update: Float[Array, "*#b q1"],
) -> Float[Array, "..."]:
    r"""$\sum_i \beta_i z_i$ from $\sum b \otimes \tilde\psi \otimes z$; cost O(K q s)."""
    # Over the basis first. For a batch that is one large product, and what it leaves, [q + 1, s],
    # is no more than the outer product of the other order, [K, q + 1], for any s up to K.
    tables = matmul(coefficients, tensor.reshape(tensor.shape[0], -1))
    tables = tables.reshape(*coefficients.shape[:-1], *tensor.shape[1:])
    return matmul(update[..., None, :], tables)[..., 0, :]


def moment_maps(
    kernel_x: KernelLike,
    kernel_y: KernelLike,
    landmarks_x: Landmarks | RandomFourier,
    landmarks_y: Landmarks | RandomFourier,
    *,
    cells: PartitionOfUnity | None = None,
    function: PointFunction = ravel_point,
    embedding: bool = True,
    shift: bool = False,
) -> MomentMaps:
    """Say what to average over a sample.

    **Arguments:**

    - `kernel_x`, `kernel_y`: kernels of the two variables.
    - `landmarks_x`, `landmarks_y`: their p and q landmarks, chosen on a subsample or a stream, or
      random Fourier features. Embeddings come out on landmarks: random Fourier features have none,
      and beliefs are then read by `state_mean` and `moment_weights`.
    - `cells`: K soft cells of x, for weights that can be clipped; None for the basis (phi, 1).
    - `function`: f of one point x whose expectations are wanted, with real values `[e]`. By default
      all numbers of the point.
    - `embedding`: keep what the embedding of a posterior and a learned transition need.
    - `shift`: keep what a filter with the shifted transition needs. Each of these two costs K (q +
      1) p numbers.

    Cost O(p^3 + q^3).

    **Raises:** `ValueError` for points outside a kernel's domain, landmarks of another type, or
    cells of other points than x.
    """
    x = _map(as_kernel(kernel_x), landmarks_x, "landmarks_x")
    y = _map(as_kernel(kernel_y), landmarks_y, "landmarks_y")
    dtype = precision_of(landmarks_x, landmarks_y)
    if dtype is not None:  # Gram matrices of labels have the default one
        x, y = in_precision((x, y), dtype)
    if cells is not None:
        check_alike(cells.centers.points, "cells.centers", x.points, "landmarks_x")
        cells = in_precision(cells, x.dtype)
    return MomentMaps(x, y, cells, function, embedding, shift)


def _map(
    kernel: AbstractKernel, choice: Landmarks | RandomFourier, name: str
) -> AbstractFeatureMap:
    """A feature map that carries no sample."""
    if isinstance(choice, RandomFourier):
        return fourier_features(kernel, choice.center, choice)
    if not isinstance(choice, Landmarks):
        raise ValueError(
            f"`{name}` must be Landmarks, for example of `greedy_landmarks` on a part of the "
            f"sample, or random Fourier features; got {choice!r}."
        )
    return landmark_features(kernel, choice.points, choice)


def pack(
    first: Float[Array, "*b h h"], corner: Float[Array, "*b h l"], second: Float[Array, "*b l l"]
) -> Float[Array, "*b t"]:
    """Symmetric matrices [[first, corner], [corner^T, second]] without repeated entries.

    l = h or h + 1.

    One rectangle [l, h + 1] holds both triangles: up to the diagonal `second`, behind it `first`.
    Taking it apart again is a few transposes of dense blocks, much faster than gathering entries.
    """
    h, low = first.shape[-1], second.shape[-1]
    rows = [(0, 0)] * (first.ndim - 2)
    left = jnp.pad(second, (*rows, (0, 0), (0, h + 1 - low)))
    right = jnp.pad(first, (*rows, (0, low - h), (1, 0)))
    triangles = jnp.where(np.tri(low, h + 1, dtype=bool), left, right)
    flat = [part.reshape(*part.shape[:-2], -1) for part in (corner, triangles)]
    return jnp.concatenate(flat, axis=-1)


def _unpack(packed: Float[Array, "*b t"], q: int) -> Float[Array, "*b q q"]:
    """The symmetric matrices of `pack`."""
    h = q // 2
    low = q - h
    corner = packed[..., : h * low].reshape(*packed.shape[:-1], h, low)
    triangles = packed[..., h * low :].reshape(*packed.shape[:-1], low, h + 1)
    first, second = triangles[..., :h, 1:], triangles[..., :low]
    first = jnp.where(np.tri(h, dtype=bool), jnp.swapaxes(first, -1, -2), first)
    second = jnp.where(np.tri(low, dtype=bool), second, jnp.swapaxes(second, -1, -2))
    top = jnp.concatenate([first, corner], axis=-1)
    bottom = jnp.concatenate([jnp.swapaxes(corner, -1, -2), second], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)
