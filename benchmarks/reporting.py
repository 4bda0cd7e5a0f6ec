"""Results: a machine description, JSON on disk, and plain tables."""

import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What a number was measured on."""
    return {
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
    }


def save(name: str, command: str, results: Any, folder: pathlib.Path = RESULTS) -> pathlib.Path:
    """Write `NAME.json` in the folder, with the command that made it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps({"command": command, "machine": machine(), "results": results}, indent=1) + "\n"
    )
    return path


def previous(name: str) -> Any:
    """What `save` wrote last under this name, {} if nothing."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, aligned, that also reads well in a terminal."""
    cells = [list(map(str, header)), *[list(map(str, row)) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def milliseconds(function: Callable[[], Any], repeats: int = 5) -> float:
    """Median wall time of a call in milliseconds, after one call to warm up."""
    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))
