"""Levels and power of the tests of hypotheses."""
