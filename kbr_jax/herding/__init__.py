"""Points that stand for an embedding: herding over candidates and in continuous space."""

from ._continuous import herd_continuous
from ._herding import HerdingResult, herd

__all__ = [
    "HerdingResult",
    "herd",
    "herd_continuous",
]
