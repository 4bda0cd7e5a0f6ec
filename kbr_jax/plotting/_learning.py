"""Pictures of what was learned."""

from typing import Any

import numpy as np

from ..learning import Report
from ..tuning import TuneResult
from ._axes import BLUE, ORANGE, axes


def plot_history(tuned: TuneResult, *, axis: Any = None) -> Any:
    """Draw the learning curve of `tune`.

    **Arguments:** `tuned`, what `tune` returned; `axis`: where to draw; a new figure by default.

    The loss is a blue line, the validation loss an orange dashed one. A ring marks what was
    returned. Steps that were rejected, because loss or gradient was not finite, leave gaps in the
    lines and crosses at the bottom. The scale is logarithmic where all that is drawn is positive
    and spans more than a factor of ten.

    **Returns:** the axis. **Raises:** `ImportError` without matplotlib.
    """
    axis = axes(axis)
    history, step, value = tuned.history, int(tuned.step), float(tuned.value)
    accepted = np.asarray(history.accepted)
    lines, names = [history.loss, history.validation], ("loss", "validation")
    marker = None if accepted.all() else "."  # a line between two gaps is a point
    curves = [np.where(accepted & np.isfinite(c), c, np.nan) for c in lines if c is not None]
    for curve, name, color, style in zip(curves, names, (BLUE, ORANGE), ("-", "--"), strict=False):
        # A validation loss now and then is a line nevertheless. The loss has gaps.
        steps = np.flatnonzero(np.isfinite(curve) | (name == "loss"))
        axis.plot(steps, curve[steps], color=color, ls=style, lw=2, label=name, marker=marker)
    ring = {"ms": 9, "mfc": "none", "mec": "black", "mew": 1.5}
    axis.plot(step, value, "o", label=f"best, step {step}", **ring)
    drawn = np.concatenate([curve[np.isfinite(curve)] for curve in curves])
    wide = drawn.size and np.max(drawn) > 10 * np.min(drawn) > 0
    axis.set(xlabel="step", ylabel="loss", yscale="log" if wide else "linear")
    rejected = np.flatnonzero(~accepted)
    if rejected.size:
        # At a fixed height of the picture: a rejected step has no loss to stand at.
        low, bottom = np.full(rejected.shape, 0.03), axis.get_xaxis_transform()
        axis.plot(rejected, low, "x", color="black", ms=5, transform=bottom, label="rejected")
    axis.legend(frameon=False)
    return axis


def plot_report(report: Report, *, axis: Any = None) -> Any:
    """Draw the held-out errors of a learned model and its rivals, with their standard errors.

    **Returns:** the axis. **Raises:** `ImportError` without matplotlib.
    """
    axis, names = axes(axis), list(report.errors)
    means, spreads = zip(*report.errors.values(), strict=True)
    axis.barh(names, means, xerr=spreads, color=[BLUE] + ["lightgray"] * (len(names) - 1))
    axis.invert_yaxis()
    axis.set_xlabel("held-out error")
    if report.coverage:
        parts = zip(*report.coverage.items(), strict=True)
        nominal, shares = (", ".join(f"{100 * u:.0f}" for u in part) for part in parts)
        axis.set_title(f"{nominal} % regions hold {shares} %", fontsize="medium", loc="right")
    return axis
