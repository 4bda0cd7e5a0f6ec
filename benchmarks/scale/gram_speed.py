r"""Gram matrices and products with them against scikit-learn, NumPy and KeOps, in one run; Gaussian
kernel, d = 10.

    python -m benchmarks.scale.gram_speed [n of the matrix] [n of the product]

The matrix: scikit-learn's `rbf_kernel`, and NumPy as one writes it ($|x|^2 + |y|^2 - 2 x y$, then
`exp`). The product $K(X, X) V$ of one column, and its gradient with respect to x, y and v: KeOps
(`Genred`, its `Grad` operator). A peer that is not installed is left out. KeOps compiles with the
system's C++ compiler.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment

DIMENSIONS, COLUMNS, BANDWIDTH = 10, (1,), 1.5
DTYPES = ("float32", "float64")


def numpy_gram(x, y):
    """The usual three lines, in place where they can be."""
    squares = (x**2).sum(1)[:, None] + (y**2).sum(1)[None] - 2 * x @ y.T
    np.maximum(squares, 0, out=squares)
    squares *= x.dtype.type(-1 / (2 * BANDWIDTH**2))
    return np.exp(squares, out=squares)


def gram_peers(x) -> dict[str, Callable[[], Any]]:
    peers: dict[str, Callable[[], Any]] = {"numpy": lambda: numpy_gram(x, x)}
    try:
        from sklearn.metrics.pairwise import rbf_kernel  # pyright: ignore[reportMissingImports]
    except ImportError:
        return peers
    return {**peers, "scikit-learn": lambda: rbf_kernel(x, x, gamma=1 / (2 * BANDWIDTH**2))}


def keops(x, v) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """The product and its gradient, or None without KeOps.

    Its gradient has one reduction a variable.
    """
    try:
        from pykeops.numpy import Genred  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    d, k = x.shape[1], v.shape[1]
    formula = "Exp(-G * SqDist(X, Y)) * V"
    variables = ["G = Pm(1)", f"X = Vi({d})", f"Y = Vj({d})", f"V = Vj({k})"]
    gamma = np.asarray([1 / (2 * BANDWIDTH**2)], x.dtype)
    product = Genred(formula, variables, reduction_op="Sum", axis=1)
    ones = np.ones_like(v)
    # A gradient is reduced over the index that its variable has not.
    slopes = [
        Genred(
            f"Grad({formula}, {name}, E)",
            [*variables, f"E = Vi({k})"],
            reduction_op="Sum",
            axis=axis,
        )
        for name, axis in (("X", 1), ("Y", 0), ("V", 0))
    ]
    return (
        lambda: product(gamma, x, x, v, backend="CPU"),
        lambda: [slope(gamma, x, x, v, ones, backend="CPU") for slope in slopes],
    )


def matrices(n: int, dtype: str) -> dict[str, float]:
    x = np.random.default_rng(0).normal(size=(n, DIMENSIONS)).astype(dtype)
    points, kernel = jnp.asarray(x), kbr.Gaussian(BANDWIDTH)
    ours = np.asarray(kbr.gram(kernel, points[:100], points))
    np.testing.assert_allclose(ours, numpy_gram(x[:100], x), atol=1e-5)
    times = {"kbr_jax": experiment.milliseconds(lambda: kbr.gram(kernel, points), 5)}
    return times | {name: experiment.milliseconds(peer, 5) for name, peer in gram_peers(x).items()}


def once(function: Callable[[], Any]) -> float:
    """Milliseconds of one run, of seconds and more, of what is compiled already."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return 1e3 * (time.perf_counter() - start)


def products(n: int, columns: int, dtype: str) -> tuple[dict[str, float], dict[str, float | None]]:
    """Milliseconds, and megabytes of temporary memory of the compiled programs."""
    rng = np.random.default_rng(0)
    x, v = (rng.normal(size=(n, k)).astype(dtype) for k in (DIMENSIONS, columns))
    kernel, points, values = kbr.Gaussian(BANDWIDTH), jnp.asarray(x), jnp.asarray(v)

    def loss(x, y, v):
        return jnp.sum(kbr.kernels.gram_matvec(kernel, x, y, v))

    arguments = (points, points, values)
    programs = {
        "product": jax.jit(lambda x, y, v: kbr.kernels.gram_matvec(kernel, x, y, v))
        .lower(*arguments)
        .compile(),
        "gradient": jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile(),
    }
    few, peers = keops(x[:100], v[:100]), keops(x, v)
    if few is not None:
        few[1]()  # KeOps compiles a formula when it meets it
        small = kbr.kernels.gram_matvec(kernel, points[:100], points[:100], values[:100])
        difference = np.abs(np.asarray(small) - few[0]()).max()
        assert difference < (1e-3 if dtype == "float32" else 1e-8) * np.sqrt(n), difference
    times, memory = {}, {}
    for index, (name, program) in enumerate(programs.items()):
        times[f"{name}, kbr_jax"] = once(lambda program=program: program(*arguments))
        if peers is not None:
            times[f"{name}, keops"] = once(peers[index])
        analysis = program.memory_analysis()
        memory[name] = None if analysis is None else analysis.temp_size_in_bytes / 1e6
    return times, memory


def main(n_gram: int = 8192, n_product: int = 50_000) -> None:
    results: dict[str, Any] = {}
    rows = []
    for dtype in DTYPES:
        times = matrices(n_gram, dtype)
        results[f"gram, n = {n_gram}, {dtype}, ms"] = times
        rows.append(
            [
                f"gram, n = {n_gram}, {dtype}",
                *(f"{name} {value:.0f}" for name, value in times.items()),
            ]
        )
        for columns in COLUMNS:
            times, memory = products(n_product, columns, dtype)
            name = f"n = {n_product}, {columns} columns, {dtype}"
            results[f"product, {name}"] = {"ms": times, "temporary memory, MB": memory}
            rows += [
                [
                    f"{part}, {name}",
                    *(
                        f"{who.split(', ')[1]} {ms:.0f}"
                        for who, ms in times.items()
                        if who.startswith(part)
                    ),
                ]
                for part in ("product", "gradient")
            ]
    width = max(map(len, rows))
    print(
        experiment.table(
            ["milliseconds", *("" for _ in range(width - 1))],
            [r + [""] * (width - len(r)) for r in rows],
        )
    )
    print(experiment.save("gram_speed", results))


if __name__ == "__main__":
    experiment.start(main)
