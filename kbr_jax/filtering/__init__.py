"""Filters: beliefs about a hidden state as weighted samples."""

from ._approximate import ApproximateFilter as ApproximateFilter
from ._base import AbstractFilter as AbstractFilter
from ._base import AbstractSampleFilter as AbstractSampleFilter
from ._base import FilterStep as FilterStep
from ._base import advance as advance
from ._base import filter as filter
from ._contrast import Contrast as Contrast
from ._controlled import ControlledFilter as ControlledFilter
from ._kernel_bayes import KernelBayesFilter as KernelBayesFilter
from ._kernel_bayes import KernelBayesState as KernelBayesState
from ._kernel_bayes import Recovery as Recovery
from ._moments import MomentFilter as MomentFilter
from ._moments import MomentStep as MomentStep
from ._rival import RivalFilter as RivalFilter
from ._rival import RivalState as RivalState
from ._smoothing import smooth as smooth
from ._windows import delay_embedding as delay_embedding
