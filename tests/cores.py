"""Each worker of the tests keeps to a core of its own. Import it before NumPy.

Two workers on two cores have four threads of LAPACK and BLAS. They wait for each other: programs
with batches of small factorizations took up to seven times as long.
"""

import contextlib
import os
from collections.abc import Iterator

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
#: Cores of the process that started this worker; none where a system does not say.
CORES = sorted(os.sched_getaffinity(os.getppid())) if hasattr(os, "sched_getaffinity") else []

if WORKER.startswith("gw") and int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) == len(CORES):
    os.sched_setaffinity(0, {CORES[int(WORKER[2:]) % len(CORES)]})  # a new one for one that died


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """What a test starts here has all cores."""
    if not CORES:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
