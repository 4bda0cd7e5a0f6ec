"""Two legs, two processes.

Float64 with checked shapes, and float32 (KBR_TEST_PRECISION=32) without the checker.
"""

import functools
import gc
import os
import pathlib
import zlib

import cores  # before NumPy
import jax
import jaxtyping
import numpy as np
import pytest
from jax._src.interpreters import mlir

FLOAT32 = os.environ.get("KBR_TEST_PRECISION", "64") == "32"

jax.config.update("jax_enable_x64", not FLOAT32)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "allow")

# Programs are compiled once a worker, and kept for the next run. Workers that share a folder would
# read what another is still writing.
COMPILED = pathlib.Path(__file__).parents[1] / "build" / "compiled"
jax.config.update("jax_compilation_cache_dir", str(COMPILED / cores.WORKER))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The float32 leg runs what a user runs: no checker in between, so bad input meets the library's own
# errors.
unchecked = ["test_float32.py", "test_errors.py", "test_propagation_errors.py"]
checked = [
    name for name in sorted(os.listdir(os.path.dirname(__file__))) if name.startswith("test_")
]
both = ["test_lowering.py"]
collect_ignore = (
    [name for name in checked if name not in unchecked + both] if FLOAT32 else unchecked
)

# A worker has one core. XLA stops at a flag that it does not know.
flags = ["--xla_cpu_multi_thread_eigen=false", "--xla_cpu_parallel_codegen_split_count=1"]
# The fusion emitters make faster programs and longer compiling: without them a first run in
# float32 takes 150 s, with them 218 s.
if jax.__version_info__ < (0, 11):
    flags.append("--xla_cpu_use_fusion_emitters=false")
if not FLOAT32:
    jaxtyping.install_import_hook("kbr_jax", "beartype.beartype")
    # Compiling is most of what the tests cost, and each program runs a few times on a few points:
    # leave LLVM's optimization to the float32 leg. `XLA_FLAGS= pytest` has it here too.
    flags += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    # What simplifies loops is a seventh of compiling a program with many of them.
    loops = "simplify-while-loops,while-loop-invariant-code-motion,while-loop-constant-sinking"
    flags.append(f"--xla_disable_hlo_passes={loops}")
os.environ.setdefault("XLA_FLAGS", " ".join(flags))


# Half of what lowering a small program costs is a new context of MLIR with all dialects, 6 ms. One
# serves all programs.
if hasattr(mlir, "make_ir_context"):
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

#: Tests whose first case takes .7 s or more, written by `pytest --store-slow`.
SLOW = pathlib.Path(__file__).parent / "slow.txt"


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="one case of each test that is not slow")
    parser.addoption("--store-slow", action="store_true", help="write down which tests are slow")


#: Long files of few tests. They come first, so that no worker is left alone with one at the end.
LONG = (
    "test_devices.py",
    "test_forecast.py",
    "test_pages.py",
    "test_conditional_independence.py",
    "test_treatment.py",
    "test_discovery.py",
    "test_imports.py",
)


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    if config.getoption("--fast"):
        seen = set(SLOW.read_text().split())
        kept = [name for item in items if (name := _function(item.nodeid)) not in seen]
        first = {}
        for item in items:
            first.setdefault(_function(item.nodeid), item)
        items[:] = [first[name] for name in dict.fromkeys(kept)]


def _function(nodeid):
    return nodeid.split("[")[0]


def pytest_runtest_logreport(report):
    if report.when == "call":
        _seconds.setdefault(_function(report.nodeid), report.duration)


def pytest_sessionfinish(session):
    gc.freeze()  # pytest collects five times at the end, and what is left is many millions
    if session.config.getoption("--store-slow") and not hasattr(session.config, "workerinput"):
        slow = sorted(name for name, seconds in _seconds.items() if seconds >= 0.7)
        SLOW.write_text("\n".join(slow) + "\n")


@pytest.fixture(autouse=True)
def _draws_of_this_test_alone(request, monkeypatch):
    """A test that draws from its module's `RNG` gets the same numbers alone, in any order and on
    any worker.
    """
    if hasattr(request.module, "RNG"):
        monkeypatch.setattr(
            request.module, "RNG", np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
        )


MAPS = pathlib.Path("/proc/self/maps")


def pytest_runtest_teardown(item, nextitem):
    """A compiled program maps memory, and Linux allows a process 65530 maps: LLVM crashes at the
    end of them. To forget programs costs seconds, and what follows is traced again: not before
    a third of the maps are there. One module adds up to a third.

    Between modules, since tests of one may count the traces of what they share.
    """
    if nextitem is None or nextitem.module is item.module:
        return
    if not MAPS.exists() or MAPS.read_bytes().count(b"\n") > 20000:
        jax.clear_caches()
        gc.collect()


_seconds: dict = {}

# Tracing makes many objects and few cycles.
gc.disable()
