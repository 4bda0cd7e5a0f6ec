"""How results are printed."""

import equinox as eqx


def with_numbers(self: eqx.Module) -> str:
    """A record with the numbers of its arrays. Long arrays are shortened."""
    return eqx.tree_pformat(self, short_arrays=False)
