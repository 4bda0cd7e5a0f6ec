"""Experiments and measurements: each module is one claim of the documentation, `python -m benchmarks` runs them all."""
