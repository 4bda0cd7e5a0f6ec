"""Run the examples of the pages, and keep the pictures that they show.

    python docs/figures/pages.py [page ...]

The n-th `plt.show()` of `guide/tests.md` writes `figures/tests-n.png`.
"""

import os
import pathlib
import re
import sys
import tempfile
from typing import Any

DOCS = pathlib.Path(__file__).resolve().parents[1]
PAGES = [
    "quick-start.md",
    "concepts.md",
    "sharp-bits.md",
    *sorted(f"guide/{p.name}" for p in (DOCS / "guide").glob("*.md")),
]


def blocks(page: str) -> list[str]:
    """The Python examples of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run(page: str, folder: pathlib.Path | None = None) -> dict[str, Any]:
    """Run the examples one after another. The result is their names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = 0

    def show() -> None:
        nonlocal shown
        shown += 1
        if folder is not None:
            plt.savefig(folder / f"{pathlib.Path(page).stem}-{shown}.png", dpi=80)
        plt.close("all")

    names: dict[str, Any] = {}
    before, plt.show = plt.show, show
    try:
        for block in blocks(page):
            exec(compile(block, page, "exec"), names)
    finally:
        plt.show = before
        plt.close("all")
    return names


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    for page in sys.argv[1:] or PAGES:
        print(f"== {page}", flush=True)
        run(page, DOCS / "figures")
