r"""Conditional distributions as estimators of scikit-learn (extra `sklearn`).

Pipelines, grid searches and cross-validation of scikit-learn take them.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from ._checks import as_points
from .embedding import density, mean, quantile
from .kernels import Delta, Precomputed
from .learning import learn_conditional, learn_forecast
from .learning._forecast import located_forecast
from .rules import fit_conditional
from .tuning._leave_out import restored_weights

__all__ = ["ConditionalEmbeddingClassifier", "ConditionalEmbeddingRegressor"]


class _Estimator(BaseEstimator):
    """What the two estimators share: their parameters, and what they check."""

    def __init__(self, *, kernel: Any = None, regularizer: Any = None):
        self.kernel = kernel
        self.regularizer = regularizer

    def _given(self) -> bool:
        """Whether kernel and regularizer are given; one of them alone is an error."""
        if (self.kernel is None) != (self.regularizer is None):
            raise ValueError("Give both `kernel` and `regularizer`, or neither to learn them.")
        return self.kernel is not None

    def _checked(self, X: Any) -> jax.Array:
        check_is_fitted(self)
        return self._rows(validate_data(self, X, reset=False))

    def _rows(self, X: Any) -> jax.Array:
        """Checked rows as points: real, or the labels of the only column for a kernel of labels."""
        if not isinstance(self.kernel, (Delta, Precomputed)):
            return _points(X, "X")
        labels = np.asarray(X)[:, 0].astype(int)
        if X.shape[1] != 1 or np.any(labels != np.asarray(X)[:, 0]):
            raise ValueError(
                f"`kernel` is {type(self.kernel).__name__}: `X` must be one column of integers."
            )
        return as_points(labels, "X")  # pyright: ignore[reportReturnType]


def _points(values: Any, name: str) -> jax.Array:
    """Real numbers in the default precision; a warning where they lose digits by it."""
    return as_points(np.asarray(values, float), name)  # pyright: ignore[reportReturnType]


def _each(function: Callable, fitted: Any, x: jax.Array) -> np.ndarray:
    """A function of what was fitted and of one point, at every point."""
    return np.asarray(_at_rows(function, fitted, x), float)


@eqx.filter_jit
def _at_rows(function: Callable, fitted: Any, x: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: function(fitted, row), x)


def _mean(forecast: Any, x: jax.Array) -> jax.Array:
    return mean(forecast(x))


def _quantiles(fitted: Any, x: jax.Array) -> jax.Array:
    forecast, levels = fitted
    return quantile(forecast(x), np.asarray(levels))


def _probabilities(fitted: Any, x: jax.Array) -> jax.Array:
    # Far from all rows the classes are as frequent as among these.
    model, numbers = fitted
    return density(model.embed_y(jnp.add(*restored_weights(model, x))), numbers)


class ConditionalEmbeddingRegressor(RegressorMixin, _Estimator):
    r"""Regression with a distribution: means and quantiles of P(y | x), by `learn_forecast`.

    **Arguments:** `kernel` of x and `regularizer`, for all that is fitted. By default both are
    chosen by exact leave-one-out. With `Delta` and `Precomputed` X is one column of integers.

    **Attributes:** `forecast_`, a `learning.Forecast`: `forecast_(x)` embeds P(y | x); `report_`,
    how it was chosen, None where nothing was.

    **Methods:** `fit(X, y)` with y `[n]` or `[n, d]`, `predict(X)`, `predict_quantiles(X, q)` and
    `score(X, y)`, R squared. Cost O(n^3) to fit, O(n^2) a row to predict; above 3 000 rows with 500
    landmarks.

    **Example:**

    >>> import numpy as np
    >>> from kbr_jax.sklearn import ConditionalEmbeddingRegressor
    >>> x = np.linspace(-3, 3, 60)[:, None]
    >>> regressor = ConditionalEmbeddingRegressor().fit(x, np.sin(x[:, 0]))
    >>> print(f"{regressor.predict([[1.0]])[0]:.2f}")
    0.84
    """

    def fit(self, X: Any, y: Any) -> "ConditionalEmbeddingRegressor":
        """Fit to n rows of X `[n, p]` and y `[n]` or `[n, d]`."""
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True)
        x, targets, self.report_ = self._rows(X), _points(y, "y"), None
        if self._given():
            self.forecast_ = located_forecast(
                lambda values: fit_conditional(
                    self.kernel, None, x, values, regularizer=self.regularizer
                ),
                targets,
            )
        else:
            self.forecast_, self.report_ = learn_forecast(x, targets, progress=False)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Conditional means `[m]` or `[m, d]`."""
        x = self._checked(X)
        return _each(_mean, self.forecast_, x)

    def predict_quantiles(self, X: Any, probabilities: Any = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Conditional quantiles `[m, q]` or `[m, q, d]`; they do not cross."""
        x = self._checked(X)
        levels = tuple(np.atleast_1d(np.asarray(probabilities, float)).tolist())
        return _each(_quantiles, (self.forecast_, levels), x)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class ConditionalEmbeddingClassifier(ClassifierMixin, _Estimator):
    r"""Classification by a conditional embedding of labels.

    **Arguments:** as `ConditionalEmbeddingRegressor`. The score that chooses is Brier's.

    **Attributes:** `classes_`; `model_`, of the numbers of the classes; `report_`, None where
    nothing was chosen.

    **Methods:** `fit(X, y)`, `predict(X)`, `predict_proba(X)` `[m, classes]`, non-negative with sum
    1, and `score(X, y)`, the accuracy. Cost as `ConditionalEmbeddingRegressor`.
    """

    def fit(self, X: Any, y: Any) -> "ConditionalEmbeddingClassifier":
        """Fit to n rows of X `[n, p]` and labels y `[n]`."""
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("`y` must hold at least 2 classes; it holds one class.")
        x, labels, self.report_ = self._rows(X), jnp.asarray(numbers, jnp.int32), None
        if self._given():
            self.model_ = fit_conditional(
                self.kernel, None, x, labels, regularizer=self.regularizer
            )
        else:
            self.model_, self.report_ = learn_conditional(x, labels, progress=False)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes `[m, classes]`."""
        x = self._checked(X)
        numbers = jnp.arange(len(self.classes_), dtype=jnp.int32)
        shares = _each(_probabilities, (self.model_, numbers), x)
        return shares / shares.sum(axis=1, keepdims=True)  # to the last digit of float64

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        best = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[best]
