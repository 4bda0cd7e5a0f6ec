"""Everything that takes a mesh, on all devices of all processes, against one device.

`python devices_program.py PROCESS PROCESSES PORT FOLDER`

Process 0 computes on one device, and leaves the results in the folder for the others.
"""

import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kbr_jax as kbr

process, processes, port = map(int, sys.argv[1:4])
ALONE = pathlib.Path(sys.argv[4]) / "alone"
jax.config.update("jax_enable_x64", True)
if processes > 1:  # before the first array
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)

MESH = jax.make_mesh((jax.device_count(),), ("cases",))
N = 45  # neither 2 nor 8 divides it
KERNEL = kbr.Gaussian(1.0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
Y, Z = (0.5 * X + RNG.normal(size=(N, 2)) for _ in range(2))
V = RNG.normal(size=(N, 3))
SEQUENCES = [jnp.asarray(Y[:7]), jnp.asarray(Y[10:22]), jnp.asarray(Y[30:33])]


def products(mesh):
    return kbr.kernels.gram_matvec(KERNEL, X, Y, V, block_size=4, mesh=mesh)


def gradients(mesh):
    def loss(bandwidth, *arrays):
        product = kbr.kernels.gram_matvec(kbr.Gaussian(bandwidth), *arrays, mesh=mesh)
        return jnp.mean(product**2)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(1.0, X, Y, V)


def conjugate_gradients(mesh):
    solver = kbr.ConjugateGradient(rank=10, tolerance=1e-12, mesh=mesh)
    model = kbr.fit_conditional(KERNEL, KERNEL, X, Y, regularizer=1e-2, solver=solver)
    return kbr.conditional_expectation(model, X[:5], jnp.sum)


def filters(mesh):
    filt = kbr.fit_filter(KERNEL, KERNEL, X, Y, regularizer=1e-3, posterior_regularizer=1e-3)
    masks = [jnp.arange(len(o)) != 2 for o in SEQUENCES]
    return kbr.run_filter(filt, SEQUENCES, observed=masks, mesh=mesh)


def two_samples(mesh):
    kernels = [KERNEL, kbr.Gaussian(2.0)]
    options = {"key": jax.random.key(0), "num_permutations": 100, "mesh": mesh}
    test = kbr.hypotheses.two_sample_test
    return [test(kernels, X, Y, null=null, **options) for null in ("permutation", "signs")]


def independence(mesh):
    options = {"key": jax.random.key(0), "num_permutations": 20, "mesh": mesh}
    test = kbr.hypotheses.independence_test
    return [test(KERNEL, KERNEL, X, Y, landmarks=rank, **options) for rank in (None, 10)]


def conditional_independence(mesh):
    return kbr.hypotheses.conditional_independence_test(
        *[KERNEL] * 3, X, Y, Z, key=jax.random.key(0), num_draws=100, mesh=mesh
    )


def landmarks(mesh, blocks=(1, 8)):
    key = jax.random.key(1)
    return [
        (
            kbr.greedy_landmarks(KERNEL, X, rank=20, block_size=block, mesh=mesh),
            kbr.rpcholesky_landmarks(KERNEL, X, rank=20, key=key, block_size=block, mesh=mesh),
            kbr.features.incomplete_cholesky(
                KERNEL, X, rank=20, key=key, tolerance=1e-2, block_size=block, mesh=mesh
            ),
        )
        for block in blocks
    ]


def propagation(mesh):
    """Many images: a batch of observed values on one graph."""
    graph = kbr.propagation.pairwise_graph(
        [[0, 1], [1, 2], [0, 3], [2, 4]], observed_nodes=[3, 4], edge_types=[0, 0, 1, 1]
    )
    model = kbr.propagation.fit_belief_propagation(
        graph, KERNEL, pairs=[(X, Y), (X, Z)], regularizer=1e-2
    )

    def mean(model, values):
        messages = kbr.propagation.belief_propagation(model, values, schedule="loopy", num_sweeps=3)
        return kbr.propagation.beliefs(model, messages).mean()

    images = jnp.asarray(Z[:10].reshape(5, 2, 2))
    return kbr.devices.over_devices(jax.vmap(mean, in_axes=(None, 0)), mesh, model, images)


def starts(mesh):
    data = jnp.asarray(X), jnp.asarray(Y)

    def loss(data, p, key):
        x, y = kbr.tuning.minibatch(data, 30, key=key)
        model = kbr.fit_conditional(kbr.Gaussian(p["h"]), KERNEL, x, y, regularizer=p["epsilon"])
        return kbr.tuning.regression_loss(model, *data)

    given = [{"h": h, "epsilon": 1e-2} for h in (0.3, 1.0, 3.0)]
    return kbr.tuning.tune_starts(
        jax.tree_util.Partial(loss, data),
        given,
        optax.adam(0.1),
        num_steps=12,
        positive=lambda p: p,
        key=jax.random.key(2),
        progress=False,
        mesh=mesh,
    )


def moments(mesh):
    maps = kbr.moments.moment_maps(
        KERNEL, KERNEL, kbr.Landmarks(jnp.asarray(X[:6])), kbr.Landmarks(jnp.asarray(Y[:6]))
    )
    count = -(-N // jax.device_count()) * jax.device_count()
    x, y = (np.resize(part, (count, 2)) for part in (X, Y))
    return kbr.moments.collect_moments(maps, x, y, mask=np.arange(count) < N, mesh=mesh)


CASES = [
    products,
    gradients,
    conjugate_gradients,
    filters,
    two_samples,
    independence,
    conditional_independence,
    landmarks,
    propagation,
    starts,
    moments,
]


def equal(found, expected):
    """The parts of a result that are here equal those of one device."""
    if not isinstance(found, jax.Array):
        assert found == expected
    elif not is_key(found):
        for part in found.addressable_shards:
            np.testing.assert_allclose(part.data, expected[part.index], rtol=1e-10, atol=1e-10)


def is_key(leaf):
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def kept(leaf):
    """A result in NumPy; keys are not compared."""
    return np.asarray(0 if is_key(leaf) else leaf) if isinstance(leaf, jax.Array) else leaf


if process == 0:
    ALONE.write_bytes(pickle.dumps([jax.tree.map(kept, case(None)) for case in CASES]))
if processes > 1:
    multihost_utils.sync_global_devices("results of one device")
alone = dict(zip(CASES, pickle.loads(ALONE.read_bytes()), strict=True))
for case in CASES:
    expected, found = alone[case], case(MESH)
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    jax.tree.map(equal, found, expected)
    print(case.__name__, flush=True)
# Samples may be on the mesh before the call, if its axes are automatic.
AUTO = jax.make_mesh((jax.device_count(),), ("cases",), axis_types=(AxisType.Auto,))
X, Y, Z, V = jax.device_put((X, Y, Z, V), NamedSharding(AUTO, P()))
jax.tree.map(equal, two_samples(AUTO), alone[two_samples])
jax.tree.map(equal, landmarks(AUTO, blocks=(8,)), alone[landmarks][1:])
# Each process may also give its own part of a sample that is divided already.
rows = NamedSharding(MESH, P("cases"))
own = np.arange(16.0).reshape(processes, -1)[process][:, None]
divided = jax.make_array_from_process_local_data(rows, own)
found = kbr.kernels.gram_matvec(KERNEL, divided, X[:, :1], V, mesh=MESH)
equal(found, kbr.kernels.gram_matvec(KERNEL, np.arange(16.0)[:, None], X[:, :1], V))
print("devices", jax.device_count(), "processes", jax.process_count())
