"""Points that stand for an embedding: herding over candidates and in continuous space."""

from ._continuous import herd_continuous as herd_continuous
from ._herding import HerdingResult as HerdingResult
from ._herding import herd as herd
