r"""Herding in continuous space: each point by gradient ascent from several starts."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import (
    as_count,
    as_points,
    as_positive,
    check_alike,
    check_finite,
    in_one_precision,
    is_concrete,
    is_real,
    known,
    size,
    take,
)
from .._lapack import solve
from .._typing import Array, ArrayLike, Float, Points
from ..embedding import Embedding, check_unbatched, evaluate
from ..embedding._decoding import stationary
from ..kernels import diagonal
from ._herding import HerdingResult

#: Newton steps at the end of each ascent; they stop improving where rounding does.
_NEWTON_STEPS = 5


def herd_continuous(
    embedding: Embedding,
    *,
    num_points: int,
    starts: Points | None = None,
    num_starts: int = 5,
    num_steps: int = 50,
    learning_rate: ArrayLike = 0.05,
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
) -> HerdingResult:
    r"""The rule "greedy" of `herd` over all of space or a box: the k-th point maximizes
    $\eta(z) - \frac1k \sum_{i<k} k(z, z_i) - \frac{1}{2k} k(z, z)$ (L15 eq 9 where k(z, z) is
    constant).

    Each maximum is sought by gradient ascent (Adam) from the best `num_starts` of the `starts`
    (all, if there are fewer), then by Newton steps, taken only where they go up.

    **Arguments:**

    - `embedding`: unbatched, on real points (one array).
    - `num_points`, `num_starts`, `num_steps` of Adam (static). `learning_rate`: of Adam, in units
      of the points, decaying to 0.
    - `starts`: `[s, ...]`, by default the embedding's points; a grid finds more of the maxima.
    - `lower`, `upper`: bounds of the box, numbers or one per coordinate. An embedding that has lost
      mass sends points to the ends of its domain: give it one, or `normalize` it first.

    **Returns:** a `HerdingResult` without `index`, in the wider dtype of the embedding's points and
    weights. Cost O(m num_starts steps (n + m) d), in one compiled scan.

    **Raises:** `ValueError` for a batch, NaN, points that are not one real array, starts of another
    kind, and bounds of another shape or order.
    """
    check_unbatched(embedding, "embedding")
    points = embedding.points
    if not is_real(points):
        raise ValueError(
            "Gradient ascent needs points that are one real array [n, ...]; use `herd` over "
            "candidates."
        )
    starts = points if starts is None else check_finite(as_points(starts, "starts"), "starts")
    check_alike(starts, "starts", points, "embedding.points")
    check_finite(embedding.weights, "embedding.weights")
    # One dtype throughout: the ascent goes back and forth between points and values.
    embedding = Embedding(embedding.kernel, *in_one_precision(points, embedding.weights))
    dtype = embedding.points.dtype
    rate = as_positive(learning_rate, "learning_rate", scalar=True).astype(dtype)
    low = _bound(-jnp.inf if lower is None else lower, "lower", embedding.points)
    high = _bound(jnp.inf if upper is None else upper, "upper", embedding.points)
    if is_concrete(low) and is_concrete(high) and not np.all(np.asarray(low) <= np.asarray(high)):
        raise ValueError(f"`lower` must not be above `upper`, got {lower} and {upper}.")
    starts = jnp.clip(jnp.asarray(starts, dtype), low, high)
    num_starts = min(as_count(num_starts, "num_starts"), size(starts))
    return _herd(
        embedding,
        starts,
        rate,
        low,
        high,
        as_count(num_points, "num_points"),
        num_starts,
        as_count(num_steps, "num_steps"),
    )


def _bound(value: ArrayLike, name: str, points: Float[Array, "n *d"]) -> Array:
    """A bound in the shape of a point."""
    shape = points.shape[1:]
    with known(value):
        found = jnp.asarray(value, points.dtype)
        if not found.ndim or found.shape == shape:
            return jnp.broadcast_to(found, shape)
    raise ValueError(f"`{name}` must be a number or have the shape {shape}, got {found.shape}.")


@eqx.filter_jit
def _herd(
    embedding: Embedding, starts, rate, low, high, count: int, num_starts: int, steps: int
) -> HerdingResult:
    kernel, dtype = embedding.kernel, embedding.weights.dtype
    target = evaluate(embedding, starts)
    own = diagonal(kernel, starts).astype(dtype) / 2

    def step(carry, k):
        chosen, used, total, linear, square = carry
        past = Embedding(kernel, chosen, used)

        def score(z):
            return evaluate(embedding, z) - (evaluate(past, z) + kernel(z, z) / 2) / k

        first = jnp.argsort(-(target - (total + own) / k))[:num_starts]
        ends = jax.vmap(lambda z: _ascend(score, embedding, z, rate, low, high, steps))(
            take(starts, first)
        )
        best = ends[jnp.argmax(jax.vmap(score)(ends))]
        linear = linear + evaluate(embedding, best)
        square = square + 2 * evaluate(past, best) + kernel(best, best)
        place = (k - 1).astype(int)
        total = total + kernel.gram(starts, best[None])[:, 0].astype(dtype)
        carry = chosen.at[place].set(best), used.at[place].set(1), total, linear, square
        return carry, square / k**2 - 2 * linear / k

    filling = jnp.broadcast_to(starts[0], (count, *starts.shape[1:]))
    zero = jnp.zeros((), dtype)
    start = (filling, jnp.zeros(count, dtype), jnp.zeros(starts.shape[0], dtype), zero, zero)
    carry, objective = lax.scan(step, start, jnp.arange(1, count + 1).astype(dtype))
    uniform = jnp.full(count, 1 / count, dtype)
    return HerdingResult(
        Embedding(kernel, carry[0], jnp.where(jnp.isnan(objective[-1]), jnp.nan, uniform)),
        None,
        objective,
    )


def _ascend(
    score: Callable,
    embedding: Embedding,
    start: Float[Array, "..."],
    rate: Array,
    low: Array,
    high: Array,
    steps: int,
) -> Float[Array, "..."]:
    """A point no worse than the start.

    Adam with a decaying rate inside the box, then Newton steps that go up.
    """
    optimizer = optax.scale_by_adam(eps=float(jnp.finfo(start.dtype).tiny) ** 0.5)  # any unit
    value_and_gradient = jax.value_and_grad(score)

    def climb(carry, t):
        z, state, best, best_value = carry
        value, gradient = value_and_gradient(z)
        better = value > best_value
        best, best_value = jnp.where(better, z, best), jnp.where(better, value, best_value)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its step count with floats
            update, state = optimizer.update(gradient, state)
        decay = (1 + jnp.cos(jnp.pi * t / steps)) / 2
        z = jnp.clip(z + rate * decay * jnp.asarray(update, z.dtype), low, high)
        return (z, state, best, best_value), None

    times = jnp.arange(steps + 1).astype(start.dtype)
    carry = (start, optimizer.init(start), start, jnp.asarray(-jnp.inf, start.dtype))
    best = lax.stop_gradient(lax.scan(climb, carry, times)[0][2])

    def newton(z, _):
        size = z.size
        free = ((z > low) & (z < high)).reshape(size)
        gradient = jnp.where(free, jax.grad(score)(z).reshape(size), 0)
        hessian = jax.hessian(score)(z).reshape(size, size)
        hessian = jnp.where(free[:, None] & free, hessian, jnp.eye(size, dtype=z.dtype))
        trial = jnp.clip(z - solve(hessian, gradient[:, None]).reshape(z.shape), low, high)
        return jnp.where(score(trial) > score(z), trial, z), None  # not so NaN

    end = lax.stop_gradient(lax.scan(newton, best, length=_NEWTON_STEPS)[0])
    found = stationary(score, embedding, start, end, (end > low) & (end < high))
    # At a bound it moves with the bound.
    return jnp.where(end <= low, low, jnp.where(end >= high, high, found))
