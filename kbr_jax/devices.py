"""Work on many cases, divided over devices."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._checks import padded

__all__ = ["over_devices"]


def over_devices(function: Callable, mesh: Any, shared: Any, cases: Any) -> Any:
    """Apply a function to a batch of cases that is divided over devices.

    Each device gets all of `shared` and its own cases. The function communicates nothing.

    **Arguments:**

    - `function(shared, cases)`: acts on a batch of cases, as `jax.vmap(f, in_axes=(None, 0))` does.
      The leading axis of each of its results is that of the cases. Define it once: a new function
      compiles anew.
    - `mesh`: the devices, all axes of the mesh together; for example
      `jax.make_mesh((jax.device_count(),), ("cases",))`. With None the function is called as it is.
      Arrays may be on the mesh before the call, if its axes are of type `Auto`.
    - `shared`: any pytree, for example a fitted model.
    - `cases`: a pytree of arrays with one leading axis of any length. It is filled up with copies
      of the last case where the number of devices does not divide it.

    **Returns:** what the function returns for all cases, divided over the devices as they are.
    Differentiable. In a run of several processes each process gives all cases; jax compares them,
    and `shared`, with those of the other processes, unless they are on the mesh already. Cost: the
    function's, for n / D cases on each of D devices (`jax.shard_map`).

    **Raises:** `ValueError` for `cases` without arrays, or of different lengths, and for a `mesh`
    that is not a `jax.sharding.Mesh`.

    **Example:**

    >>> import jax, jax.numpy as jnp, kbr_jax as kbr
    >>> mesh = jax.make_mesh((jax.device_count(),), ("cases",))
    >>> scaled = jax.vmap(lambda factor, case: factor * case, in_axes=(None, 0))
    >>> print(kbr.devices.over_devices(scaled, mesh, 2.0, jnp.arange(3.0)))
    [0. 2. 4.]
    """
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(cases)}
    if len(lengths) != 1 or () in lengths or (0,) in lengths:
        raise ValueError(
            "`cases` must hold arrays with one leading axis of one length, at least 1; got "
            f"leading axes {sorted(lengths)}."
        )
    if mesh is None:
        return function(shared, cases)
    mesh = as_mesh(mesh)
    ((count,),) = lengths
    missing = -count % mesh.size
    cases = padded(cases, missing) if missing else cases
    everywhere, divided = PartitionSpec(), PartitionSpec(mesh.axis_names)
    arrays, rest = eqx.partition((function, shared), eqx.is_array)
    arrays = _placed(arrays, NamedSharding(mesh, everywhere))
    cases = _placed(cases, NamedSharding(mesh, divided))
    results = _run(mesh, rest, arrays, cases)
    return jax.tree.map(lambda leaf: leaf[:count], results) if missing else results


def as_mesh(mesh: Any) -> Mesh:
    """The same devices, with axes of type `Auto`."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            "`mesh` must be a `jax.sharding.Mesh`, for example "
            f'`jax.make_mesh((jax.device_count(),), ("cases",))`; got {type(mesh).__name__}.'
        )
    return Mesh(mesh.devices, mesh.axis_names)


def _placed(tree: Any, sharding: NamedSharding) -> Any:
    """Arrays on all devices of a mesh."""

    def place(leaf):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.device_put(leaf, sharding)
        # Keys cannot be put on devices of other processes, but their numbers can.
        data = jax.device_put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))

    return jax.tree.map(place, tree)


@eqx.filter_jit
def _run(mesh: Mesh, rest: Any, arrays: Any, cases: Any) -> Any:
    def on_one_device(arrays, cases):
        function, shared = eqx.combine(arrays, rest)
        return function(shared, cases)

    rows = PartitionSpec(mesh.axis_names)
    # Which values agree on all devices is not inferred through the solves.
    return jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows),
        out_specs=rows,
        check_vma=False,
    )(arrays, cases)
