"""What tests share: comparing, the Gaussian Gram matrix in NumPy, gradients by differences."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree


def closeness(rtol: float, atol: float, replaces: str = "both") -> Callable[..., None]:
    """A `close(actual, expected, ...)` with the tolerances of a file.

    A third argument replaces `"rtol"`, `"atol"` or both, and a fourth one `"atol"`.
    """

    def close(actual: Any, expected: Any, *limits: float, **named: float) -> None:
        found = {"rtol": rtol, "atol": atol}
        if limits:
            first = ("rtol", "atol") if replaces == "both" else (replaces,)
            found |= dict.fromkeys(first, limits[0]) | dict(
                zip(("atol",), limits[1:], strict=False)
            )
        if (tol := named.pop("tol", None)) is not None:
            found |= dict.fromkeys(("rtol", "atol"), tol)
        np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), **(found | named))

    return close


def close_trees(actual: Any, expected: Any, tol: float = 1e-12) -> None:
    """All leaves are near each other."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tol, atol=tol)


def gaussian(a: Any, b: Any, h: float) -> np.ndarray:
    """The Gram matrix of the Gaussian kernel, from the formula. Points are rows or numbers."""
    a, b = (np.asarray(part).reshape(len(part), -1) for part in (a, b))
    return np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * h**2))


def check_gradient(
    loss: Callable[[Any], Any],
    at: Any,
    *,
    rtol: float,
    atol: float,
    steps: Any = 1e-6,
    entries: Any = None,
) -> None:
    """Compare `jax.grad(loss)` with central differences, one entry of the flat tree at a time."""
    flat, unravel = ravel_pytree(at)
    run = jax.jit(lambda vector: loss(unravel(vector)))
    gradient = np.asarray(jax.jit(jax.grad(run))(flat))
    steps = np.broadcast_to(steps, flat.shape)
    for i in range(flat.size) if entries is None else entries:
        move = jnp.zeros_like(flat).at[i].set(steps[i])
        difference = (run(flat + move) - run(flat - move)) / (2 * steps[i])
        np.testing.assert_allclose(gradient[i], difference, rtol=rtol, atol=atol)
