"""Time all cases, and compare their ratios to the yardsticks with the stored ones.

    python -m benchmarks.suite          # names what became slower by 1.5
    python -m benchmarks.suite store    # stores the ratios

A ratio is the time of ours over that of the yardstick in the same run, so it moves little from one
machine to another.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from .. import experiment

SLOWER = 1.5
NAME = "suite"


def measured() -> dict[str, dict[str, float]]:
    """Medians in milliseconds and their ratio, by case."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "times.json"
        options = ["--benchmark-warmup=on", "--benchmark-max-time=0.8", "--benchmark-min-rounds=5"]
        file = str(pathlib.Path(__file__).parent / "speed.py")
        command = [sys.executable, "-m", "pytest", "-q", "--benchmark-quiet", *options]
        subprocess.run([*command, f"--benchmark-json={path}", file], check=True)
        times = json.loads(path.read_text())["benchmarks"]
    found: dict[str, dict[str, float]] = {}
    for one in times:
        info = one["extra_info"]
        found.setdefault(info["case"], {})[info["side"]] = 1e3 * one["stats"]["median"]
    for case in found.values():
        case["ratio"] = case["kbr_jax"] / case["yardstick"]
    return found


def main(word: str = "") -> None:
    found, stored = measured(), experiment.previous(NAME)
    rows, slower = [], []
    for name, case in found.items():
        before = stored.get(name, {}).get("ratio", float("nan"))
        numbers = [f"{case[side]:.2f}" for side in ("kbr_jax", "yardstick")]
        rows.append([name, *numbers, f"{case['ratio']:.3f}", f"{before:.3f}"])
        if case["ratio"] > SLOWER * before:
            slower.append(name)
    print(experiment.table(["call", "ms", "yardstick, ms", "ratio", "stored ratio"], rows))
    if word == "store":
        print(experiment.save(NAME, found))
    elif slower:
        sys.exit(f"Slower by {SLOWER}: {'; '.join(slower)}.")


if __name__ == "__main__":
    experiment.start(main, double=False)
