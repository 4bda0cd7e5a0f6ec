"""Learning: losses, gradient descent on them, cross-validation, saving and loading."""

from ._calibration import (
    adaptive_margins,
    calibrate,
    conformal_margin,
    coverage,
    fit_bandwidth,
)
from ._cross_validation import GridSearchResult, cross_validate, grid_search
from ._leave_out import (
    condition_adjusted,
    leave_out_forecasts,
    leave_out_loss,
    leave_out_residuals,
)
from ._losses import (
    filter_loss,
    marginal_loss,
    mmd_power,
    regression_loss,
    spectral_loss,
)
from ._saving import load, save
from ._starts import tune_starts
from ._tune import History, TuneResult, minibatch, tune

__all__ = [
    "GridSearchResult",
    "History",
    "TuneResult",
    "adaptive_margins",
    "calibrate",
    "condition_adjusted",
    "conformal_margin",
    "coverage",
    "cross_validate",
    "filter_loss",
    "fit_bandwidth",
    "grid_search",
    "leave_out_forecasts",
    "leave_out_loss",
    "leave_out_residuals",
    "load",
    "marginal_loss",
    "minibatch",
    "mmd_power",
    "regression_loss",
    "save",
    "spectral_loss",
    "tune",
    "tune_starts",
]
