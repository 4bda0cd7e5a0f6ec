"""The file from which a descent goes on."""

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from .._typing import Array
from ._saving import load, save

#: What a checkpoint holds.
_NAMES = {"initial", "key", "every", "done", "state", "parts"}


def write_checkpoint(
    path, free: list[Array], done: int, state: Any, parts: list, key, every: int
) -> None:
    """Write what `read_checkpoint` needs to go on."""
    # Leaves and their names: the optimizer's state holds the user's classes, which a file cannot
    # name.
    leaves = dict(_named_leaves(state))
    content = {"initial": free, "key": key, "every": every, "done": done, "state": leaves}
    save(path, {**content, "parts": parts})


def read_checkpoint(
    path, free: list[Array], state: Any, key, every: int, num_steps: int
) -> tuple[int, Any, list] | None:
    """What a checkpoint holds, if there is one; it must be of a run that began in the same way."""
    if not pathlib.Path(path).exists():
        return None
    found = load(path)
    same = isinstance(found, dict) and set(found) == _NAMES and found["every"] == every
    same = (
        same
        and isinstance(found["state"], dict)
        and _kind(found["state"]) == _kind(dict(_named_leaves(state)))
    )
    same = same and all(
        bool(jnp.array_equal(a, b, equal_nan=True))
        for a, b in zip(found["initial"], free, strict=True)
    )
    same = (
        same
        and (found["key"] is None) == (key is None)
        and (key is None or _same_key(found["key"], key))
    )
    if not same:
        raise ValueError(
            f"The checkpoint {os.fspath(path)!r} is of another run: other initial parameters, "
            f"optimizer, key or options. Remove "
            "it, or give this run a file of its own."
        )
    if found["done"] > num_steps:
        raise ValueError(
            f"The checkpoint {os.fspath(path)!r} has {found['done']} steps, more than `num_steps` "
            f"= {num_steps}."
        )
    state = jax.tree.unflatten(
        jax.tree.structure(state), [found["state"][name] for name, _ in _named_leaves(state)]
    )
    return found["done"], state, found["parts"]


def check_course(path, written: Any, again: Any, count: int) -> None:
    """Raise a `ValueError` unless the first steps that were written are those of this run."""
    before, now = (
        [part[:count] for part in (h.loss, h.validation) if part is not None]
        for h in (written, again)
    )
    if len(before) != len(now) or not all(
        bool(jnp.allclose(a, b, rtol=1e-3, atol=0, equal_nan=True))
        for a, b in zip(before, now, strict=True)
    ):
        raise ValueError(
            f"The checkpoint {os.fspath(path)!r} is of another run: another loss, validation or "
            "learning rate. Remove it, or give this run a file of its own."
        )


def _same_key(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(jnp.all(a == b))


def _named_leaves(state: Any) -> list[tuple[str, Array]]:
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]


def _kind(tree: Any) -> Any:
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
