"""Depth from features by belief propagation, and a tree of bimodal variables."""
