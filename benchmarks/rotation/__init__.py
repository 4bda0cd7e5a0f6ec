"""Rotation dynamics of F11 and S13, beside the optimal filter."""
