"""The picture of a test."""

from typing import Any

import numpy as np

from ..hypotheses import TestResult
from ._axes import BLUE, ORANGE, axes


def plot_test(result: TestResult, *, axis: Any = None) -> Any:
    """Draw the null distribution of a test and its statistic.

    **Arguments:** `result`, of one test that has draws of its null distribution; `axis`: where to
    draw; a new figure by default.

    The histogram is of the draws, those beyond the statistic are orange, and the line is the
    statistic. `plot_witness` shows where two samples differ: give it embeddings by
    `result.kernels[int(result.best)]`, the kernel that decided.

    **Returns:** the axis.

    **Raises:** `ValueError` for a batch of results, or a test without draws; `ImportError` without
    matplotlib.
    """
    null = np.asarray(result.null)
    if result.p_value.ndim or null.ndim != 1:
        raise ValueError("`result` is a batch: give one result.")
    if not null.size:
        raise ValueError("`result` has no draws: its test compares with a known distribution.")
    axis, statistic = axes(axis), float(result.statistic)
    edges = np.histogram_bin_edges(null, bins=min(40, max(10, null.size // 20)))
    axis.hist(null, edges, color=BLUE, alpha=0.5, label="null distribution")
    # As many as the p-value counts: draws equal up to rounding are among them.
    count = 0 if np.isnan(result.p_value) else round(float(result.p_value) * (null.size + 1)) - 1
    beyond = np.sort(null)[null.size - max(count, 0) :]
    if beyond.size:
        axis.hist(beyond, edges, color=ORANGE, label="beyond the statistic")
    axis.axvline(statistic, color="black", lw=2, label=f"statistic, p = {result.p_value:.3g}")
    axis.set(xlabel="statistic", ylabel="draws")
    axis.set_title(result.hypothesis, fontsize="medium", loc="left")
    axis.legend()
    return axis
