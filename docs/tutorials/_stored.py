"""Keep executed notebooks, and check that they are those of the code.

    python docs/tutorials/_stored.py          # execute what has changed
    python docs/tutorials/_stored.py check    # fail where a stored notebook is of other code
"""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def is_current(source: pathlib.Path) -> bool:
    """Whether the stored notebook has the cells of the script, and no messages of a machine."""
    import jupytext

    stored = ROOT / "docs" / "tutorials" / f"{source.stem}.ipynb"
    if not stored.exists():
        return False
    ours, theirs = jupytext.read(source), jupytext.read(stored)

    def cells(book):
        return [(cell.cell_type, cell.source.strip()) for cell in book.cells]

    return cells(ours) == cells(theirs) and not any(map(_messages, theirs.cells))


def _messages(cell) -> list:
    """Outputs of progress bars and warnings."""
    return [o for o in cell.get("outputs", []) if o.get("name") == "stderr"]


def strip_bars(path: pathlib.Path) -> None:
    """Remove progress bars; any other message stays, for `is_current` to refuse."""
    import nbformat

    book = nbformat.read(path, as_version=4)
    for cell in book.cells:
        bars = [o for o in _messages(cell) if "Warning" not in o["text"]]
        if bars:
            cell["outputs"] = [o for o in cell["outputs"] if o not in bars]
    nbformat.write(book, path)


def main() -> None:
    """Execute or check all notebooks."""
    stale = [p for p in sorted((ROOT / "notebooks").glob("*.py")) if not is_current(p)]
    if "check" in sys.argv[1:]:
        if stale:
            names = ", ".join(path.stem for path in stale)
            sys.exit(f"Stored notebooks of other code: {names}. Run `make notebooks`.")
        return
    for path in stale:
        stored = ROOT / "docs" / "tutorials" / f"{path.stem}.ipynb"
        command = ["-m", "jupytext", "--to", "ipynb", "--execute", path, "--output", stored]
        subprocess.run([sys.executable, *command], check=True)
        strip_bars(stored)


if __name__ == "__main__":
    main()
