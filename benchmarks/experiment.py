"""What all experiments share: how they start, repetitions that resume, summaries, tables, JSON."""

import argparse
import functools
import inspect
import itertools
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

ROOT = pathlib.Path(__file__).parent
RESULTS, DATA, FIGURES = ROOT / "results", ROOT / "data", ROOT.parent / "docs" / "figures"
#: Repetitions of a run that was cut off; git ignores them.
UNFINISHED = ROOT.parent / "build" / "experiments"


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


@functools.cache
def commit() -> str:
    """The commit that is checked out; with a `+` where a program differs from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT.parent, capture_output=True, text=True)
        return done.stdout.strip()

    changed = "+" if git("status", "--porcelain", "--", "*.py") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed


def arguments(main: Callable[..., None], given: Sequence[str] | None = None) -> list[Any]:
    """Words of the command line as the parameters of `main`, of their types.

    `--help` prints the docstring of its module.
    """
    parser = argparse.ArgumentParser(
        description=inspect.getmodule(main).__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parameters = inspect.signature(main, eval_str=True).parameters.values()
    for parameter in parameters:
        several = parameter.kind is parameter.VAR_POSITIONAL
        parser.add_argument(
            parameter.name,
            nargs="*" if several else "?",
            type=parameter.annotation,
            default=() if several else parameter.default,
        )
    found = vars(parser.parse_args(given))
    values = []
    for parameter in parameters:
        value = found[parameter.name]
        values += value if parameter.kind is parameter.VAR_POSITIONAL else [value]
    return values


def start(main: Callable[..., None], *, double: bool = True) -> None:
    """Run the `main` of an experiment with the words of the command line, in 64 or 32 bits."""
    jax.config.update("jax_enable_x64", double)
    main(*arguments(main))


def command() -> str:
    """How the program that runs was started, without its words."""
    specification = sys.modules["__main__"].__spec__
    module = specification.name.removesuffix(".__main__") if specification else "unknown"
    return ("KBR_DATA=FOLDER " if "KBR_DATA" in os.environ else "") + f"python -m {module}"


def save(
    name: str, results: Any, *words: str, folder: pathlib.Path = RESULTS, part: str = ""
) -> pathlib.Path:
    """Write `NAME.json` in the folder, with the command and its words, machine and commit.

    If only a `part` was run, command and machine stay those of the whole, and the commit of the
    part stands behind that of the whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    found = {
        "command": " ".join([command(), *words]),
        "commit": commit(),
        "machine": machine(),
        "results": results,
    }
    if part and path.exists():
        last = json.loads(path.read_text())
        others = [one for one in last["commit"].split("; ") if not one.endswith(f" ({part})")]
        commits = "; ".join([*others, f"{commit()} ({part})"])
        found = last | {"commit": commits, "results": results}
    path.write_text(json.dumps(found, indent=1) + "\n")
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


def paired(errors: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """Ratio of two means and difference of them, with standard errors over paired repetitions."""
    ratio, difference, root = errors.mean() / base.mean(), errors - base, np.sqrt(len(base))

    def deviation(values: np.ndarray) -> float:
        return float(np.std(values, ddof=1) / root) if len(values) > 1 else float("nan")

    return {
        "ratio": float(ratio),
        "ratio_se": deviation(errors - ratio * base) / float(base.mean()),
        "difference": float(difference.mean()),
        "difference_se": deviation(difference),
    }


def columns(rows: Sequence[dict[str, float]]) -> dict[str, np.ndarray]:
    """One array over repetitions for each method."""
    return {name: np.asarray([row[name] for row in rows]) for name in rows[0]}


def ratios(rows: Sequence[dict[str, float]], base: str) -> dict[str, dict[str, float]]:
    """Mean error of each method, and its ratio to that of `base`."""
    found = columns(rows)
    return {
        name: {"mse": float(errors.mean())}
        | {key: paired(errors, found[base])[key] for key in ("ratio", "ratio_se")}
        for name, errors in found.items()
    }


def repeat(key: str, repetition: Callable[[int], Any], count: int, bar: Any = None) -> list[Any]:
    """Results of seeds 0, 1, ... of a repetition, in order.

    Each is written down when it is known. A run that was cut off goes on where it stopped, if the
    commit is the same and no program differs from it.
    """
    UNFINISHED.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "_" for letter in f"{key} {commit()}")
    path = UNFINISHED / f"{name}.jsonl"
    if commit().endswith("+"):
        path.unlink(missing_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for seed in range(count):
        if seed >= len(rows):
            found = json.dumps(repetition(seed), default=lambda leaf: np.asarray(leaf).tolist())
            rows.append(json.loads(found))
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        if bar is not None:
            bar.update()
    return rows[:count]


def run_cells(
    name: str,
    defaults: dict[int, int],
    systems: Sequence[str],
    repetition: Callable[[str, int, int], Any],
    summarize: Callable[[list[Any]], dict[str, Any]],
    repetitions: int = 0,
    sizes: Sequence[int] = (),
) -> dict[str, Any]:
    """Repeat each cell, and save its summary.

    `defaults` are the repetitions of each T. Cells of other `sizes` keep their last results.
    """
    count = {size: repetitions or defaults[size] for size in sizes or defaults}

    def label(system: str, size: int) -> str:
        return f"({system}) T = {size}" if system else f"T = {size}"

    results = {label(system, size): {} for system in systems for size in defaults}
    results |= previous(name)
    with tqdm(total=len(systems) * sum(count.values()), unit="run") as bar:
        for size, system in itertools.product(count, systems):
            cell = label(system, size)
            rows = repeat(
                f"{name} {cell}",
                lambda seed, s=system, t=size: repetition(s, t, seed),
                count[size],
                bar,
            )
            results[cell] = {"repetitions": count[size], **summarize(rows)}
            save(name, {cell: values for cell, values in results.items() if values})
    return {cell: values for cell, values in results.items() if values}


def show_ratios(cells: dict[str, Any], part: str) -> None:
    """Print the ratios of all methods, a column for each cell."""
    found = [cell[part] for cell in cells.values()]
    rows = [
        [name, *(f"{c[name]['ratio']:.3f} ± {c[name]['ratio_se']:.3f}" for c in found)]
        for name in found[0]
    ]
    print(table(["mean squared error, ratio", *cells], rows))
