"""Learning: losses, gradient descent on them, cross-validation, saving and loading."""

from ._cross_validation import Grid as Grid
from ._cross_validation import cross_validate as cross_validate
from ._cross_validation import grid_search as grid_search
from ._losses import filter_loss as filter_loss
from ._losses import leave_out_loss as leave_out_loss
from ._losses import marginal_loss as marginal_loss
from ._losses import mmd_power as mmd_power
from ._losses import regression_loss as regression_loss
from ._saving import load as load
from ._saving import save as save
from ._tune import History as History
from ._tune import TuneResult as TuneResult
from ._tune import minibatch as minibatch
from ._tune import tune as tune
