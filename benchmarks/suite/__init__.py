"""Two minutes that show what became slower: each call beside NumPy or SciPy in the same run."""
