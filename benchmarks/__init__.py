"""Experiments and measurements, a folder a story.

`python -m benchmarks` runs them all. `python -m benchmarks report` writes the pages of results.
"""
