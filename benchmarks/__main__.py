"""Run every benchmark, each in a process of its own; the results land in `benchmarks/results/`."""

import subprocess
import sys

MODULES = [
    "filter_speed",
    "gram_speed",
    "conjugate_gradient",
    "landmark_selection",
    "transition_operators",
    "moments",
    "moments_camera",
    "rank",
    "precision",
    "rotation_dynamics",
    "smoothing",
    "controls",
    "half_known",
    "kernel_kalman",
    "gradient_cost",
    "rotation_tuning",
    "windows",
    "camera_selection",
    "camera_accuracy",
    "camera_recovery",
    "camera_tuning",
    "camera_demo",
    "indoor",
    "rat",
    "rat_figure",
    "bimodal_tree",
    "depth",
    "extrapolation",
    "drift",
    "adaptation",
    "herding_speed",
    "hypotheses",
    "posterior_inference",
    "likelihood_free",
]

ARGUMENTS = {"camera_demo": ["results"]}


def main() -> None:
    for module in MODULES:
        print(f"\n== {module}", flush=True)
        # The demo writes to `build/demo` unless it is told otherwise.
        subprocess.run(
            [sys.executable, "-m", f"benchmarks.{module}", *ARGUMENTS.get(module, [])], check=True
        )


if __name__ == "__main__":
    main()
