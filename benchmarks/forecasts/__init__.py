"""Conditional distributions that one can read, beside forests, networks and densities."""
