"""Distributions that drift (L15)."""
