r"""Pictures of embeddings, beliefs, tests and learning curves, on matplotlib axes:
`from kbr_jax import plotting`.

Needs the extra `plot`, which is imported when something is drawn. Colors are told apart by
color-blind eyes, and nothing is told by color alone: what is negative also points down or is
dashed, and shades only grow darker.
"""

from ._embeddings import plot_embedding, plot_witness
from ._learning import plot_history, plot_report
from ._series import plot_beliefs, plot_intervals
from ._tests import plot_test

__all__ = [
    "plot_beliefs",
    "plot_embedding",
    "plot_history",
    "plot_intervals",
    "plot_report",
    "plot_test",
    "plot_witness",
]
