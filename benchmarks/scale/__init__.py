"""Time, memory and precision."""
