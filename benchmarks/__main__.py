"""Run every benchmark, each in a process of its own, or write the pages of their results.

python -m benchmarks            # days; the results land in `benchmarks/results/`
python -m benchmarks report     # seconds
"""

import os
import pathlib
import subprocess
import sys

from . import report

#: What is not run, and why.
APART = {
    "scale.accelerator": "needs an environment with `jax[cuda13]`",
    "scale.stress": "writes no results",
    "suite": "`make bench`",
}
#: Without its word the demo writes to `build/demo`.
WORDS = {"camera.demo": ["results"]}


def experiments() -> list[str]:
    """All modules that `experiment.start` starts."""
    root = pathlib.Path(__file__).parent
    found = []
    for path in sorted(root.glob("*/*.py")):
        if "    experiment.start(" in path.read_text():
            parts = path.relative_to(root).with_suffix("").parts
            found.append(".".join(part for part in parts if part != "__main__"))
    return found


def main() -> None:
    failed = []
    if "KBR_DATA" not in os.environ:
        print("KBR_DATA is not set: experiments on public recordings will fail.")
    for module in experiments():
        if module in APART:
            continue
        print(f"\n== {module}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{module}", *WORDS.get(module, [])]
        if subprocess.run(command).returncode:
            failed.append(module)
    report.main()
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    if "report" in sys.argv[1:]:
        report.main()
    else:
        main()
