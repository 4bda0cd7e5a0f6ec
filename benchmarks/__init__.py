"""Experiments and measurements.

Each module is one claim of the documentation, `python -m benchmarks` runs them all.
"""
