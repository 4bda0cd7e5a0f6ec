r"""Proper scores of forecasts by what happened."""

import jax
import jax.numpy as jnp
from jax import lax

from .._numerics import matmul, one_program, power_of_two
from .._typing import Array, ArrayLike, Float, Point, Points
from ..kernels import Energy, gram_matvec
from ._densities import FAR, bandwidths, equal, is_label, log_volume, probabilities, real_rows
from ._embedding import Embedding, normalized, one_each
from ._quantiles import unknown


def energy_score(embedding: Embedding, points: Point | Points) -> Float[Array, "*b"]:
    r"""Score of a forecast by what happened: $E|Y - y| - \frac12 E|Y - Y'|$, in the units of y.

    It is proper: the true distribution has the least mean. In one dimension it is the continuous
    ranked probability score (CRPS), $\int (F(t) - 1[y \le t])^2 dt$ (Gneiting and Raftery 2007, eq
    20 to 22). Weights of any sign are taken as they are, divided by their sum.

    **Arguments:** `embedding`, on points that are one real array, weights `[n]` or `[b, n]`;
    `points`, one point, or one for each of b forecasts `[b, ...]`.

    **Returns:** a scalar or `[b]`. NaN as `quantile`. Cost O(n^2 (b + d)), memory O(b n).
    **Raises:** `ValueError` for points of another kind or number, and for labels.
    """
    rows, weights = one_each(embedding, points), normalized(jnp.atleast_2d(embedding.weights))
    atoms = embedding.points
    if is_label(atoms):
        raise ValueError("The energy score measures distances of real points: use `log_score`.")
    atoms, rows = real_rows(atoms, weights.dtype), real_rows(rows, weights.dtype)
    scores = _energy_scores(atoms, rows, weights)
    scores = jnp.where(unknown(jnp.atleast_2d(embedding.weights)), jnp.nan, scores)
    return scores[0] if embedding.weights.ndim == 1 else scores


@one_program
def _energy_scores(
    atoms: Float[Array, "n d"], rows: Float[Array, "b d"], weights: Float[Array, "b n"]
) -> Float[Array, " b"]:
    # Squares of numbers below 1e-19 are 0 in float32: each sum has a unit of its own, which neither
    # an atom without weight nor the point of another forecast enters.
    used = jnp.any(weights != 0, axis=0)[:, None]
    count = jnp.maximum(jnp.sum(used), 1).astype(atoms.dtype)
    center = jnp.sum(jnp.where(used, atoms, 0), axis=0) / count
    atoms, rows = atoms - center, rows - center
    kernel = Energy(jnp.zeros_like(center))

    def placed(unit):  # finite where an atom without weight is far away
        return jnp.clip(atoms / unit, -FAR, FAR)

    def unit_for(*points):
        most = jnp.max(jnp.stack([jnp.max(jnp.abs(lax.stop_gradient(p))) for p in points]))
        return power_of_two(jnp.where(most > 0, most, 1))

    def of_point(row):
        point, weight = row
        unit = unit_for(point, jnp.where(used, atoms, 0))
        cross = matmul(kernel.gram(point[None] / unit, placed(unit))[0], weight)
        return unit * (kernel.diagonal(point[None] / unit)[0] - 2 * cross)

    unit = unit_for(jnp.where(used, atoms, 0))
    smooth = gram_matvec(kernel, placed(unit), placed(unit), weights.T).T
    found = lax.map(of_point, (rows, weights), batch_size=64)
    return found + unit * jnp.sum(smooth * weights, axis=-1)


def log_score(
    embedding: Embedding, points: Point | Points, *, bandwidth: ArrayLike = 1.0
) -> Float[Array, "*b"]:
    r"""Score of a forecast by what happened: $- \log f(y)$ with f of `density`.

    **Arguments:** as `energy_score`, for real points or labels; `bandwidth` as `density`.

    **Returns:** a scalar or `[b]`, infinite where the density is 0. Cost O(b n d). **Raises:**
    `ValueError` as `density` and for another number of points.
    """
    rows = one_each(embedding, points)
    shares = probabilities(embedding).reshape(-1, embedding.weights.shape[-1])
    if is_label(embedding.points):
        logs = jnp.log(jnp.sum(jnp.where(equal(embedding.points, rows).T, shares, 0), axis=1))
        logs = jnp.where(jnp.isnan(shares[:, 0]), jnp.nan, logs)
    else:
        atoms, at = (real_rows(part, shares.dtype) for part in (embedding.points, rows))
        logs = _log_densities(atoms, shares, at, bandwidths(embedding, shares, bandwidth))
    return -logs[0] if embedding.weights.ndim == 1 else -logs


@jax.jit
def _log_densities(
    atoms: Float[Array, "n d"],
    shares: Float[Array, "b n"],
    points: Float[Array, "b d"],
    widths: Float[Array, "b d"],
) -> Float[Array, " b"]:
    """Log densities of b forecasts, each at its own point."""

    def one(row):
        share, point, width = row
        powers = -0.5 * jnp.sum(((atoms - point) / width) ** 2, axis=1)
        return jax.nn.logsumexp(powers, b=share) - log_volume(width)

    return lax.map(one, (shares, points, widths))
