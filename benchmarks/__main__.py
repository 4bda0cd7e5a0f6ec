"""Run every benchmark, each in a process of its own, or write the pages of their results.

python -m benchmarks            # hours; the results land in `benchmarks/results/`
python -m benchmarks report     # seconds
"""

import subprocess
import sys

from . import report

MODULES = [
    "scale.filter_speed",
    "scale.gram_speed",
    "scale.conjugate_gradient",
    "scale.landmarks",
    "scale.transition_operators",
    "scale.moments",
    "scale.rank",
    "scale.precision",
    "scale.gradient_cost",
    "scale.herding",
    "scale.multihost",
    "scale.first_call",
    "rotation.dynamics",
    "rotation.smoothing",
    "rotation.controls",
    "rotation.half_known",
    "rotation.kernel_kalman",
    "rotation.tuning",
    "rotation.windows",
    "camera.selection",
    "camera.accuracy",
    "camera.recovery",
    "camera.tuning",
    "camera.moments",
    "camera.demo",
    "indoor.walker",
    "rat.decoding",
    "rat.figure",
    "depth.bimodal_tree",
    "depth.images",
    "lampert.extrapolation",
    "lampert.drift",
    "lampert.adaptation",
    "tests.levels",
    "inference.posterior",
    "inference.likelihood_free",
]

ARGUMENTS = {"camera.demo": ["results"]}


def main() -> None:
    for module in MODULES:
        print(f"\n== {module}", flush=True)
        # The demo writes to `build/demo` unless it is told otherwise.
        subprocess.run(
            [sys.executable, "-m", f"benchmarks.{module}", *ARGUMENTS.get(module, [])], check=True
        )
    report.main()


if __name__ == "__main__":
    if "report" in sys.argv[1:]:
        report.main()
    else:
        main()
