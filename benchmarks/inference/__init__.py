"""Posteriors: kernel Bayes' rule on densities, and without a likelihood."""
