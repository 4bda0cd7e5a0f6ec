"""An instrumental regression whose bandwidths are chosen by leave-one-out."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._checks import as_points, check_finite, check_same_size, is_real, size, take
from .._typing import Array, Float, Points
from ..causal import InstrumentalRegression, fit_instrument
from ..causal._units import in_units
from ..kernels import AbstractKernel, Gaussian, default_kernel
from ..tuning._progress import progress_bar
from ._folds import spread
from ._search import search

#: Units that are seen while choosing, their features, and candidates over the whole range and near
#: the best.
UNITS, RANK, TRIALS, REFINEMENTS = 1000, 150, 80, 80
#: Bandwidths, in units of the median distance.
RANGE = 0.1, 10.0


class _Setting(eqx.Module):
    """Kernels of the treatment, the instrument and the covariates at unit bandwidths."""

    kernels: tuple[AbstractKernel, ...]

    def at(self, scales: dict[str, Array]) -> tuple[AbstractKernel, ...]:
        """The kernels, with bandwidths times the scales of their coordinates."""
        found = []
        for index, kernel in enumerate(self.kernels):
            if isinstance(kernel, Gaussian):
                unit = kernel.bandwidth
                own = [scales[_name(index, c)] for c in range(unit.size)]
                kernel = Gaussian(unit * jnp.stack(own).reshape(unit.shape).astype(unit.dtype))
            found.append(kernel)
        return tuple(found)

    def names(self) -> list[str]:
        """Of all bandwidths."""
        return [
            _name(index, c)
            for index, kernel in enumerate(self.kernels)
            if isinstance(kernel, Gaussian)
            for c in range(kernel.bandwidth.size)
        ]


def _name(index: int, coordinate: int) -> str:
    return f"bandwidth of {('x', 'z', 'covariates')[index]}, coordinate {coordinate}"


def _inside(scales: dict[str, Array]) -> dict[str, Array]:
    """Bandwidths in their range. With wider ones the Gram matrix is one of rounding."""
    return {name: jnp.clip(value, *RANGE) for name, value in scales.items()}


@eqx.filter_jit
def _errors(setting: _Setting, data: tuple, scales: dict[str, Array]) -> Float[Array, " n"]:
    """Squared errors of y of units left out of the second stage."""
    x, z, y, covariates = data
    model = fit_instrument(x, z, y, covariates=covariates, kernels=setting.at(scales), rank=RANK)
    fit, rows = model.fit, model.features.matrix
    y = in_units(y.reshape(y.shape[0], -1).astype(rows.dtype), None)
    left = 1 - fit.share - jnp.sum((rows - fit.center) * fit.slope.T, axis=1)
    rest = y - fit.predict(rows, y)
    return jnp.sum(rest**2, axis=1) / jnp.maximum(left, jnp.finfo(left.dtype).eps ** 0.5) ** 2


def learn_instrument(
    x: Points, z: Points, y: Points, *, covariates: Points | None = None, progress: bool = True
) -> tuple[InstrumentalRegression, dict[str, Array]]:
    r"""Fit the effect of x on y with an instrument; choose a bandwidth for each coordinate.

    The loss is the leave-one-out error of the second stage of `causal.fit_instrument`: how well the
    instrument and the covariates predict y through the structural function. It does not measure the
    error of the structural function, which cannot be observed. It is searched coarsely, and then
    near its minimum. Of all candidates within one standard error of the least loss, the one with
    the widest kernels is taken: where y is noisy, narrow ones fit the noise.

    The search pays where the noise of y is small and covariates act sharply: on the demand design
    it divides the squared error of the defaults by more than 10. Where a confounder makes most of
    y its choice is not reliable: of three such samples of 800 units two had five times the root
    mean squared error of a polynomial of degree 3.

    **Arguments:** `x`, `z`, `y`, `covariates` as `causal.fit_instrument` takes them. Real ones get
    a Gaussian kernel, others their default. `progress`: a bar, where tqdm is installed.

    **Returns:** the model of all units, and the bandwidths in units of the defaults. Cost of 160
    fits to at most 1 000 units with 150 features.

    **Raises:** `ValueError` as `causal.fit_instrument`.

    **Example:**

    >>> import jax, jax.numpy as jnp, kbr_jax as kbr
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> z, u, e = (jax.random.normal(key, (60,)) for key in keys)
    >>> x = z + u
    >>> model, chosen = kbr.learning.learn_instrument(x, z, jnp.sin(x) + u, progress=False)
    >>> sorted(chosen)
    ['bandwidth of x, coordinate 0', 'bandwidth of z, coordinate 0']
    """
    x, z, y = (
        check_finite(as_points(part, name), name) for part, name in ((x, "x"), (z, "z"), (y, "y"))
    )
    parts = [x, z]
    if covariates is not None:
        covariates = check_finite(as_points(covariates, "covariates"), "covariates")
        parts.append(covariates)
    for part, name in zip(parts, ("x", "z", "covariates"), strict=False):
        check_same_size(part, name, y, "y")
    setting = _Setting(tuple(_unit(part) for part in parts))
    data = take((x, z, y, covariates), spread(size(y), UNITS))
    names = setting.names()
    with progress_bar(TRIALS + REFINEMENTS, progress) as bar:
        scales: dict[str, Array] = {}
        if names:
            ranges = dict.fromkeys(names, RANGE)

            tried: list[tuple[dict[str, Array], np.ndarray]] = []

            def evaluate(option: _Setting, values: dict, _: float) -> Any:
                values = _inside(values)
                tried.append((values, np.asarray(_errors(option, data, values))))
                return np.log(tried[-1][1].mean())

            search(evaluate, [setting], ranges, TRIALS, REFINEMENTS, bar)
            scales = _widest(tried)
    model = fit_instrument(x, z, y, covariates=covariates, kernels=setting.at(scales))
    return model, scales


def _widest(tried: list[tuple[dict[str, Array], np.ndarray]]) -> dict[str, Array]:
    """The widest kernels whose loss is within a standard error of the least one."""
    tried = [one for one in tried if np.isfinite(one[1]).all()]
    best = min(tried, key=lambda one: one[1].mean())[1]
    near = [
        scales
        for scales, errors in tried
        if (errors - best).mean() <= (errors - best).std() / np.sqrt(best.size)
    ]
    return max(near, key=lambda scales: sum(np.log(value) for value in scales.values()))


def _unit(points: Points) -> AbstractKernel:
    """The default kernel, with a bandwidth for each coordinate of vectors."""
    kernel = default_kernel(points)
    if is_real(points) and isinstance(kernel, Gaussian):
        return Gaussian(jnp.broadcast_to(kernel.bandwidth, points.shape[1:]))
    return kernel
