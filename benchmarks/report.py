"""The pages of results and the README, written from `results/*.json`.

    python -m benchmarks report          # write them
    python -m benchmarks report check    # fail if a page is not what the results say

A page is a Jinja template beside its experiments, in which `results(name)` is the JSON of an
experiment. All tables of ours come from there; published numbers of others stand in the templates.
"""

import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import numpy as np

from . import experiment

ROOT = experiment.ROOT.parent
#: Does not break at the end of a line.
PLUS_MINUS = "\u00a0±\u00a0"
STORIES = (
    "rotation",
    "camera",
    "rat",
    "indoor",
    "lampert",
    "inference",
    "tests",
    "forecasts",
    "causal",
    "depth",
    "scale",
)
#: Template, and the page it becomes.
PAGES = {
    "benchmarks/readme.md": "README.md",
    "benchmarks/scale/devices.md": "docs/scale.md",
    "benchmarks/results.md": "docs/results/index.md",
    **{f"benchmarks/{story}/page.md": f"docs/results/{story}.md" for story in STORIES},
}


def stored(name: str) -> dict[str, Any]:
    """Command, commit, machine and results of an experiment."""
    return json.loads((experiment.RESULTS / f"{name}.json").read_text())


def _filled(pattern: str, cell: Any) -> str:
    """The pattern with a number, or with the entries of a record; empty where one is missing."""
    if cell is None:
        return ""
    try:
        text = pattern.format(**cell) if isinstance(cell, Mapping) else pattern.format(cell)
        return text.replace(" ± ", PLUS_MINUS)
    except (KeyError, TypeError):
        return ""


def _lines(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table. A row or a column without any number is a misspelled key."""
    for cells in (*(row[1:] for row in rows), *zip(*rows, strict=True)):
        if not any(cells):
            raise ValueError(f"Nothing was found for a row or a column below {header}.")
    return "\n".join(
        ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    )


def grid(
    columns: Mapping[str, Mapping[str, Any]],
    pattern: str,
    corner: str = "",
    rows: Mapping[str, str] | list[str] | None = None,
) -> str:
    """A table of one kind of number: `columns[title][row]` in a pattern.

    `rows` are the keys to show, or a mapping from keys to titles; all of the first column by
    default.
    """
    keys = rows if rows is not None else list(next(iter(columns.values())))
    titles = keys if isinstance(keys, Mapping) else {key: key for key in keys}
    body = [
        [title, *(_filled(pattern, column.get(key)) for column in columns.values())]
        for key, title in titles.items()
    ]
    return _lines([corner, *columns], body)


def listing(
    records: Mapping[str, Any],
    patterns: Mapping[str, str],
    corner: str = "",
    rows: Mapping[str, str] | list[str] | None = None,
) -> str:
    """A table of several numbers of each record: a column for each pattern."""
    keys = rows if rows is not None else list(records)
    titles = keys if isinstance(keys, Mapping) else {key: key for key in keys}
    body = [
        [title, *(_filled(pattern, records.get(key)) for pattern in patterns.values())]
        for key, title in titles.items()
    ]
    return _lines([corner, *patterns], body)


def pick(cells: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """For each cell what lies at the path."""
    found: dict[str, Any] = dict(cells)
    for key in path:
        found = {cell: value.get(key, {}) for cell, value in found.items()}
    return found


def curves(methods: Mapping[str, list[dict[str, Any]]]) -> str:
    """A table of errors against calls."""
    calls = sorted({point["calls"] for points in methods.values() for point in points})
    rows = {
        name: {point["calls"]: point["error"] for point in points}
        for name, points in methods.items()
    }
    columns = {f"{n} calls": {name: row.get(n) for name, row in rows.items()} for n in calls}
    return grid(columns, "{:.3g}")


def speedups(settings: Mapping[str, Mapping[str, float | None]], calls: str) -> str:
    """A table of one error to be met: methods by the cost of a call."""
    wanted = f"as good as rejection ABC with {calls} calls"
    columns = {
        title.split(",")[0]: found for title, found in settings.items() if title.endswith(wanted)
    }
    shown = {
        title: {name: "-" if v is None else f"{v:.2g}" for name, v in column.items()}
        for title, column in columns.items()
    }
    return grid(shown, "{}")


def _difference(errors: list[float], base: list[float]) -> str:
    pair = experiment.paired(np.asarray(errors), np.asarray(base))
    return f"{pair['difference']:+.4f} ± {pair['difference_se']:.4f}"


#: What templates may do with a value.
FILTERS: dict[str, Callable[..., Any]] = {
    "fixed": lambda value, digits=2: f"{value:.{digits}f}",
    "signed": lambda value, digits=4: f"{value:+.{digits}f}",
    "power": lambda value: f"{value:.0e}".replace("e-0", "e-"),
    "count": lambda value: f"{value:,.0f}".replace(",", " "),
    "maybe": lambda value, digits: "" if value is None else f"{value:.{digits}f}",
    "fixed_list": lambda values, digits: ", ".join(f"{value:.{digits}f}" for value in values),
    "minus": _difference,
    "entries": lambda cell, *names: " | ".join(f"{cell[name]['value']:.3f}" for name in names),
    "averages": lambda cells, key: {k: float(np.mean(c[key])) for k, c in cells.items()},
    "tails": lambda cells, key: {k: pick(c, key) for k, c in cells.items()},
    "without": lambda cells, *names: {k: v for k, v in cells.items() if k not in names},
    "matching": lambda cells, start: {
        k: v for k, v in cells.items() if k.startswith(start) and isinstance(v, dict)
    },
    "curves": curves,
    "speedups": speedups,
}


def rendered(template: str) -> str:
    """The page of a template."""
    used: list[str] = []

    def results(name: str) -> Any:
        if name not in used:
            used.append(name)
        return stored(name)["results"]

    def sources() -> str:
        """Where each number on the page so far comes from."""
        rows = []
        for name in used:
            found = stored(name)
            host = found["machine"]
            chip = host["device"]
            chip = f"{host['cores']} x cpu {host['architecture']}" if chip == "cpu" else chip
            machine = f"{chip}, jax {host['jax']}"
            rows.append([f"`{found['command']}`", machine, found["commit"]])
        return _lines(["command", "machine", "commit"], rows)

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(FILTERS)
    names = {"results": results, "sources": sources, "grid": grid, "listing": listing, "pick": pick}
    return environment.get_template(template).render(**names, mean=lambda x: sum(x) / len(x))


def main() -> None:
    """Write all pages, or check them."""
    differing = []
    for template, page in PAGES.items():
        path = pathlib.Path(ROOT / page)
        text = rendered(template)
        if "check" in sys.argv:
            if not path.exists() or path.read_text() != text:
                differing.append(page)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if differing:
        sys.exit(f"Not what the results say: {', '.join(differing)}. `python -m benchmarks report`")


if __name__ == "__main__":
    main()
