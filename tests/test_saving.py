"""Saved objects come back bitwise, by structure alone.

Whatever cannot be stored or trusted is an error that says what to do.
"""

import functools
import io
import json
import os
import pathlib
import subprocess
import sys
import zipfile
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kbr_jax as kbr
from kbr_jax import load, save

RNG = np.random.default_rng(0)
N = 7
STATES = jnp.asarray(RNG.normal(size=(N + 1, 2)))
VIEWS = jnp.asarray(RNG.normal(size=(N, 3)))
SEEN = jnp.asarray(RNG.normal(size=(4, 3)))
G = kbr.Gaussian(0.7)
BAYES = {"regularizer": 1e-2, "posterior_regularizer": 1e-3}


def own_kernel(x, y):
    return jnp.exp(-jnp.sum(jnp.abs(x - y)))


def own_simulator(key, state):
    return state + 0.1 * jax.random.normal(key, state.shape)


def own_features(view):
    return view * jnp.asarray([1.0, 2.0, 3.0])


class OwnKernel(kbr.kernels.AbstractKernel):
    power: jax.Array

    def __call__(self, x, y):
        return own_kernel(x, y) ** self.power


class Pair(NamedTuple):
    left: Any
    right: Any


OWN = {
    "simulator": own_simulator,
    "kernel": own_kernel,
    "features": own_features,
    "OwnKernel": OwnKernel,
    "Pair": Pair,
}


@functools.cache
def bayes_filter():
    return fit()


def fit(**options):
    return kbr.fit_filter(G, G, STATES, VIEWS, **{**BAYES, **options})


@functools.cache
def moments():
    centers = kbr.Landmarks(STATES[:3])
    maps = kbr.moments.moment_maps(
        G, G, centers, kbr.Landmarks(VIEWS[:3]), cells=kbr.soft_partition(G, centers)
    )
    return kbr.moments.collect_moments(maps, STATES[:-1], VIEWS, STATES[1:])


def moment_filter():
    emission = kbr.moments.fit_conditional(moments(), regularizer=0.1)
    centers = moments().maps.cells.centers
    maps = kbr.moments.moment_maps(G, G, centers, centers)
    transition = kbr.moments.collect_moments(maps, STATES[:-1], STATES[1:])
    transition = kbr.moments.fit_conditional(transition, regularizer=0.1)
    return kbr.KernelBayesFilter(emission, transition, regularizer=0.1)


def restarting_filter():
    """Put together by hand.

    What a fit computes does not matter here, and it compiles for seconds.
    """
    base, number = bayes_filter(), jnp.asarray(0.5)
    discriminant = kbr.filtering.DiscriminantLikelihood(
        G, STATES, VIEWS[0], VIEWS.T[:, :2], VIEWS[0, :2], STATES, jnp.eye(N + 1), *[number] * 3
    )
    return kbr.filtering.CusumRestartFilter(
        base=base,
        discriminant=discriminant,
        factor=base.emission.factor,
        points=STATES,
        predictions=(STATES[:, :2], STATES[:, 0]),
        template=VIEWS[0],
        features=jax.tree_util.Partial(own_features),
        decode=kbr.mean,
        exclusion=number,
        slack=number,
        threshold=jnp.asarray(1.0),
    )


def half_known_filter():
    known = kbr.SimulatedTransition(own_simulator, key=jax.random.key(0), num_draws=2)
    return kbr.KernelBayesFilter(bayes_filter().emission, known, regularizer=0.1)


def fourier_maps():
    return kbr.moments.moment_maps(
        G, G, *(kbr.random_fourier(G, 2, rank=4, key=jax.random.key(i)) for i in range(2))
    )


def adam_state():
    params = {"bandwidth": jnp.asarray(0.5), "ridges": (jnp.ones(2), None)}
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0.1, 0.0, 9))
    ).init(params)


#: Everything that can be saved, made on demand.
CASES = {
    "numbers": lambda: [
        None,
        True,
        3,
        -0.5,
        1e300,
        float("inf"),
        2**80,
        "text ä",
        (),
        [],
        {},
        (1, [2]),
    ],
    "dict": lambda: {
        "b": 1,
        "a": (jnp.ones(2),),
        "": {2: [STATES], 1: None},
        "pairs": {(1, "x"): 2},
    },
    "kernels": lambda: [
        kbr.Gaussian(jnp.asarray([0.5, 2.0])),
        kbr.Polynomial(3, 0.5, 2.0),
        kbr.RationalQuadratic(1.0, 0.3),
        kbr.Delta(),
        kbr.Precomputed(jnp.eye(3)),
    ],
    "composed kernel": lambda: 2.0 * (G + kbr.Laplace(1.0) * kbr.Linear()),
    "kernels of parts": lambda: kbr.TensorProduct(
        (G, kbr.DirectSum((kbr.Delta(), kbr.Matern32(1.0))))
    ),
    "own function as kernel": lambda: kbr.embed(own_kernel, STATES).kernel,
    "kernel class": lambda: OwnKernel(jnp.asarray(2.0)),
    "kernel object as function": lambda: kbr.embed(
        eqx.tree_at(lambda k: k.power, OwnKernel(1.0), 2.0), STATES
    ),
    "named tuple": lambda: Pair(STATES, (None, Pair(1, "x"))),
    "embedding": lambda: kbr.embed(kbr.TensorProduct((G, kbr.Linear())), (STATES, STATES)),
    "joint embedding": lambda: kbr.embedding.embed_joint(G, kbr.Linear(), STATES[:-1], VIEWS),
    "conditional": lambda: kbr.fit_conditional(
        G, G, STATES[:-1], VIEWS, regularizer=0.1, landmarks_x=kbr.Landmarks(STATES[:3])
    ),
    "conjugate gradients": lambda: kbr.fit_conditional(
        G,
        G,
        STATES[:-1],
        VIEWS,
        regularizer=0.1,
        solver=kbr.ConjugateGradient(rank=0, tolerance=1e-6),
    ),
    "random features": fourier_maps,
    "landmarks": lambda: kbr.Landmarks(STATES[:3], jnp.asarray([True, False, True])),
    "moments": moments,
    "moment model": lambda: kbr.moments.fit_conditional(moments(), regularizer=0.1),
    "moment filter": moment_filter,
    "filter": bayes_filter,
    "filter with options": lambda: fit(
        max_active=3, mask=jnp.arange(N + 1) < 6, clipping=kbr.Clipping(truncation=0.1)
    ),
    "restarting filter": restarting_filter,
    "half known filter": half_known_filter,
    "run": lambda: kbr.run_filter(bayes_filter(), SEEN),
    "filter of 2009": lambda: kbr.fit_conditional_embedding_filter(
        G, G, STATES, VIEWS, regularizer=0.1
    ),
    "state": lambda: kbr.init_filter(bayes_filter()),
    "optimizer state": adam_state,
    "function": lambda: (kbr.mean, kbr.fit_filter, moments().maps.function),
    "partial": lambda: jax.tree_util.Partial(
        kbr.rules.clip_and_normalize, STATES[0], clipping=kbr.Clipping()
    ),
    "structure": lambda: jax.tree.structure({"a": (1, None), "b": kbr.Gaussian(1.0)}),
    "numpy": lambda: [
        np.arange(3),
        np.float32(2.5),
        np.asfortranarray(np.ones((2, 3))),
        np.bool_(True),
        np.array(1j),
    ],
    "empty array": lambda: jnp.zeros((0, 3)),
}
DTYPES = [
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bool",
    "int8",
    "uint32",
    "int4",
]


def assert_same(got, want):
    """The same tree, down to types and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert type(a) is type(b)
        if not hasattr(b, "dtype"):
            assert a is b or a == b
            continue
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            assert a.dtype == b.dtype
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def round_trip(folder, tree, functions=OWN):
    save(folder / "saved.kbr", tree, functions=functions)
    return load(folder / "saved.kbr", functions=functions)


def rewrite(path, change=lambda header: None, arrays=None):
    """Save again, by hand, with another structure or other bytes of arrays."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(entries["structure.json"])
    change(header)
    entries |= {"structure.json": json.dumps(header).encode(), **(arrays or {})}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            if content is not None:
                archive.writestr(name, content)


@pytest.mark.parametrize("name", CASES)
def test_round_trip(name, tmp_path):
    want = CASES[name]()
    got = round_trip(tmp_path, want)
    assert type(got) is type(want)
    assert_same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_every_dtype(dtype, shape, tmp_path):
    want = jnp.asarray(RNG.integers(0, 2, size=shape)).astype(dtype)
    assert_same(round_trip(tmp_path, [want, np.asarray(want)]), [want, np.asarray(want)])
    weak = jnp.asarray(2.0)
    assert weak.weak_type and not round_trip(tmp_path, weak).weak_type


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_random_keys(generator, tmp_path):
    keys = jax.random.split(jax.random.key(5, impl=generator), 3)
    got = round_trip(tmp_path, {"keys": keys, "one": keys[0], "raw": jax.random.PRNGKey(1)})
    assert_same(got["keys"], keys)
    assert_same(jax.random.normal(got["one"], (3,)), jax.random.normal(keys[0], (3,)))


def test_nan_and_signed_zeros(tmp_path):
    got = round_trip(tmp_path, [float("nan"), -0.0, jnp.asarray([jnp.nan, -0.0])])
    assert np.isnan(got[0]) and str(got[1]) == "-0.0" and str(np.asarray(got[2])) == "[nan -0.]"


def test_optimiser_continues(tmp_path):
    optimizer, params = optax.adam(1e-2), jnp.ones(3)
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.update(params, optimizer.init(params))[1]
        assert_same(
            optimizer.update(params, round_trip(tmp_path, state)), optimizer.update(params, state)
        )


def test_a_shared_array_is_stored_and_loaded_once(tmp_path):
    filt = bayes_filter()
    save(tmp_path / "filter", filt)
    with zipfile.ZipFile(tmp_path / "filter") as archive:
        assert len(archive.namelist()) - 1 == len({id(leaf) for leaf in jax.tree.leaves(filt)})
    got = load(tmp_path / "filter")
    assert got.transition.learned.factor.upper is got.emission.factor.upper
    first, second = round_trip(tmp_path, [np.ones(3)] * 2)
    assert first is second


def test_the_file_holds_arrays_and_text_and_no_pickle(tmp_path):
    save(tmp_path / "filter.any", restarting_filter(), functions=OWN)
    with zipfile.ZipFile(tmp_path / "filter.any") as archive:
        names = archive.namelist()
        assert archive.testzip() is None and names[0] == "structure.json"
        for name in names[1:]:
            with archive.open(name) as file:
                np.lib.format.read_array(file, allow_pickle=False)
        assert b"pickle" not in archive.read("structure.json")
        header = json.loads(archive.read("structure.json"))
    assert (header["format"], header["version"], header["functions"]) == (
        "kbr_jax tree",
        1,
        ["features"],
    )
    assert header["tree"]["object"][1]["decode"] == {"function": "kbr_jax:mean"}
    assert os.listdir(tmp_path) == ["filter.any"]


def test_equal_trees_give_equal_files_by_any_kind_of_path(tmp_path):
    save(str(tmp_path / "a"), bayes_filter())
    save(tmp_path / "b", bayes_filter())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert_same(load(str(tmp_path / "a")), load(tmp_path / "b"))


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    save(path, G)
    with pytest.raises(ValueError):
        save(path, [STATES, own_kernel])

    def full(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(OSError, match="disk full"):
        save(path, bayes_filter())
    assert os.listdir(tmp_path) == ["file"]
    assert_same(load(path), G)


def test_loaded_in_another_process(tmp_path):
    filt = bayes_filter()
    save(tmp_path / "in", (filt, SEEN))
    program = (
        "import sys, kbr_jax as kbr\n"
        "from kbr_jax import load, save\n"
        "filt, seen = load(sys.argv[1])\n"
        "save(sys.argv[2], kbr.run_filter(filt, seen))\n"
    )
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    arguments = [sys.executable, "-c", program, str(tmp_path / "in"), str(tmp_path / "out")]
    subprocess.run(arguments, check=True, env=environment, cwd=pathlib.Path(__file__).parent.parent)
    assert_same(load(tmp_path / "out"), kbr.run_filter(filt, SEEN))


#: What cannot be saved, and what the message says: where it is, what it is, what to do.
REFUSED = {
    "lambda": (lambda: {"f": lambda x: x}, r"`tree\['f'\]` is .*<lambda>.*functions="),
    "kernel": (
        lambda: kbr.embed(own_kernel, STATES),
        r"`tree.kernel.function.static\[0\]` is own_kernel.*functions=",
    ),
    "features": (restarting_filter, r"`tree.features\[0\]` is own_features"),
    "class": (lambda: (1, OwnKernel(jnp.ones(()))), r"`tree\[1\]` is an object of .*OwnKernel"),
    "named tuple": (lambda: Pair(1, 2), "`tree` is an object of .*Pair"),
    "outside": (lambda: np.linalg.norm, "`tree` is norm"),
    "partial": (lambda: functools.partial(kbr.mean), "`tree` is an object of functools.partial"),
    "set": (lambda: [{1}], r"`tree\[0\]` is an object of builtins.set.*take it out"),
    "method": (lambda: bayes_filter().mean, "`tree` is .*mean|BoundMethod"),
    "objects": (lambda: np.asarray([None]), "`tree` is an array of object"),
    "foreign bytes": (lambda: np.ones(2, ">f8"), "`tree` is an array of >f8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved(name, tmp_path):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "file", make())
    assert not os.listdir(tmp_path)


def test_traced_values_are_refused(tmp_path):
    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(ValueError, match=r"`tree\.bandwidth` is traced .* outside `jit`"):
            transform(lambda h: save(tmp_path / "file", eqx.tree_at(lambda k: k.bandwidth, G, h)))(
                jnp.ones(1)
            )


def test_functions_of_the_user_are_asked_for(tmp_path):
    path = tmp_path / "file"
    tree = (kbr.embed(own_kernel, STATES), OwnKernel(jnp.ones(())))
    save(path, tree, functions=OWN)
    with pytest.raises(
        ValueError, match=r"functions of yours, \['OwnKernel', 'kernel'\]: `load\(path, functions="
    ):
        load(path)
    other = load(
        path, functions={"kernel": own_features, "OwnKernel": OwnKernel, "unused": kbr.mean}
    )
    assert other[0].kernel.function.static == (own_features,)
    with pytest.raises(ValueError, match="has the fields"):
        load(path, functions={"kernel": own_kernel, "OwnKernel": Pair})


def test_64_bits_are_not_cut(tmp_path):
    save(tmp_path / "wide", [STATES, np.ones(2)])
    save(tmp_path / "narrow", [STATES.astype("float32"), np.ones(2)])
    with jax.enable_x64(False):
        with pytest.raises(
            ValueError, match=r"wide` cannot be loaded: it holds float64 arrays.*jax_enable_x64"
        ):
            load(tmp_path / "wide")
        assert [leaf.dtype for leaf in load(tmp_path / "narrow")] == ["float32", "float64"]


def tree_of(node):
    return lambda header: header.update(tree=node)


def entry(**changes):
    return lambda header: header["arrays"][0].update(changes)


#: Files that are not to be trusted: what is put in place of the structure, and what the message
#: says.
FORGED = {
    "other format": (lambda header: header.update(format="other"), "`save` did not write it"),
    "newer version": (
        lambda header: header.update(version=2, library="9.9"),
        "newer kbr_jax, version 9.9.*update",
    ),
    "no version": (lambda header: header.pop("version"), "damaged"),
    "wrong version": (lambda header: header.update(version="x"), "damaged"),
    "wrong shape": (entry(shape=[3]), r"damaged: array 0 is float64\[\]"),
    "wrong dtype": (entry(dtype="float32"), "damaged: array 0 is float64"),
    "wrong dtype name": (entry(dtype="float99"), "damaged"),
    "wrong kind": (entry(kind="other"), "damaged"),
    "more arrays": (lambda header: header["arrays"].append(header["arrays"][0]), "damaged.*1.npy"),
    "array number": (tree_of({"array": 1}), "damaged"),
    "unknown node": (tree_of({"code": "1"}), "damaged"),
    "two kinds": (tree_of({"array": 0, "tuple": []}), "cannot be loaded"),
    "key": (tree_of({"key": ["threefry2x32", {"array": 0}]}), "damaged"),
    "unknown generator": (tree_of({"key": ["other", {"array": 0}]}), "cannot be loaded"),
    "deep": (
        tree_of(functools.reduce(lambda node, _: [node], range(900), 1)),
        "damaged.*recursion",
    ),
    "unknown class": (
        tree_of({"object": ["kbr_jax:Gauss", {}]}),
        "kbr_jax:Gauss is unknown here.*version",
    ),
    "moved class": (
        tree_of({"object": ["kbr_jax.gone:Gaussian", {}]}),
        "kbr_jax.gone:Gaussian is unknown",
    ),
    "other fields": (
        tree_of({"object": ["kbr_jax:Gaussian", {"sigma": {"array": 0}}]}),
        r"\['bandwidth'\] here and \['sigma'\] in the file",
    ),
    "abstract": (tree_of({"object": ["kbr_jax.kernels:AbstractKernel", {}]}), "damaged"),
    "no module": (tree_of({"object": ["kbr_jax.tuning._saving:_Encoder", {}]}), "has the fields"),
    "class outside": (tree_of({"object": ["equinox:Module", {}]}), "equinox:Module is unknown"),
    "builtin": (tree_of({"function": "builtins:eval"}), "builtins:eval is unknown"),
    "system": (tree_of({"function": "os:system"}), "os:system is unknown"),
    "imported": (tree_of({"function": "kbr_jax.tuning._saving:os.remove"}), "unknown"),
    "imported class": (tree_of({"object": ["kbr_jax.tuning._saving:Partial", {}]}), "unknown"),
    "function of optax": (tree_of({"function": "optax:apply_updates"}), "unknown"),
    "call": (tree_of({"partial": [1, {"tuple": []}, {"dict": []}]}), "damaged"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_files(name, tmp_path):
    change, message = FORGED[name]
    path = tmp_path / "file"
    save(path, G)
    rewrite(path, change)
    with pytest.raises(ValueError, match=f"file` .*{message}|file` cannot be loaded: {message}"):
        load(path)


def test_damaged_and_foreign_files(tmp_path):
    path = tmp_path / "file"
    save(path, [STATES, VIEWS])
    good = path.read_bytes()
    for cut in range(0, len(good), 97):
        path.write_bytes(good[:cut])
        with pytest.raises(ValueError, match="file` is damaged, or `save` did not write it"):
            load(path)
    numbers = good.index(np.asarray(VIEWS).tobytes())
    path.write_bytes(good[:numbers] + bytes([good[numbers] ^ 1]) + good[numbers + 1 :])
    with pytest.raises(ValueError, match=r"damaged.*CRC"):
        load(path)
    path.write_bytes(good)
    rewrite(path, arrays={"1.npy": None})
    with pytest.raises(ValueError, match=r"damaged.*1\.npy"):
        load(path)
    np.savez(tmp_path / "other.npz", STATES)
    with pytest.raises(ValueError, match="`save` did not write it"):
        load(tmp_path / "other.npz")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("structure.json", "[]")
    with pytest.raises(ValueError, match="`save` did not write it"):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")


def test_a_pickle_in_the_place_of_an_array_is_not_opened(tmp_path):
    path = tmp_path / "file"
    save(path, G)
    np.save(tmp_path / "objects.npy", np.asarray([{}]), allow_pickle=True)
    rewrite(path, arrays={"0.npy": (tmp_path / "objects.npy").read_bytes()})
    with pytest.raises(ValueError, match=r"cannot be loaded: .*allow_pickle=False"):
        load(path)


def _without_arrays(node):
    """The same structure with a word where an array stood."""
    if isinstance(node, dict):
        return "abc" if "array" in node else {k: _without_arrays(v) for k, v in node.items()}
    return [_without_arrays(item) for item in node] if isinstance(node, list) else node


@pytest.mark.parametrize("crafted", ["word", "negative"])
def test_values_that_a_class_would_refuse_are_not_loaded(tmp_path, crafted):
    path = tmp_path / "saved.kbr"
    save(path, kbr.Gaussian(1.0))
    if crafted == "word":
        rewrite(path, lambda header: header.update(_without_arrays(header)))
    else:
        data = io.BytesIO()
        np.lib.format.write_array(data, np.asarray(-1.0))
        rewrite(path, arrays={"0.npy": data.getvalue()})
    with pytest.raises(ValueError, match="bandwidth"):
        load(path)


def test_batches_and_moments_of_an_optimizer(tmp_path):
    x = jnp.linspace(0, 1, 12)[:, None]

    def fit(h):
        return kbr.fit_filter(
            kbr.Gaussian(h), kbr.Gaussian(0.5), x, x, regularizer=1e-2, posterior_regularizer=1e-2
        )

    trees = [
        jax.vmap(fit)(jnp.asarray([0.5, 1.0])),
        optax.adam(0.1).init(kbr.Gaussian(1.0)),
        jax.vmap(lambda a: a * kbr.Gaussian(1.0))(jnp.ones(3)),
    ]
    for number, tree in enumerate(trees):
        save(tmp_path / str(number), tree)
        found = load(tmp_path / str(number))
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        assert jax.tree.all(jax.tree.map(np.array_equal, found, tree))


def test_leaves_come_back_as_they_were(tmp_path):
    kernel = jax.device_get(kbr.Gaussian(2.0))
    mask = jax.tree.map(lambda leaf: leaf > 0, kbr.Gaussian(2.0))
    for tree in (kernel, mask):
        save(tmp_path / "file", tree)
        found = load(tmp_path / "file")
        assert type(found.bandwidth) is type(tree.bandwidth)
        assert found.bandwidth.dtype == tree.bandwidth.dtype
    with pytest.raises(ValueError, match="a dtype of words"):
        save(tmp_path / "file", [np.dtype("U5")])
