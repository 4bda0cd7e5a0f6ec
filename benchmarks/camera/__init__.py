"""A camera's direction of view from its video."""
