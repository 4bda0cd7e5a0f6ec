"""A rat's place from its hippocampus."""
