"""Estimators of scikit-learn on a predicted distribution.

Weights of any sign through flipped labels.
"""

import copy
import dataclasses
from typing import Any

import numpy as np

from .._typing import ArrayLike
from ._predicted_svm import flip_labels


@dataclasses.dataclass(frozen=True)
class PredictedEstimator:
    """Fitted estimators, one against the rest.

    One for two classes, else one for each of the `classes` `[c]`.
    """

    estimators: tuple[Any, ...]
    classes: np.ndarray

    def decision_function(self, x: ArrayLike) -> np.ndarray:
        """Decision values `[n, c]` at points `[n, d]`.

        One column for two classes, positive for the second.
        """
        return np.stack(
            [estimator.decision_function(np.asarray(x)) for estimator in self.estimators], axis=1
        )

    def predict(self, x: ArrayLike) -> np.ndarray:
        """Classes `[n]` at points `[n, d]`."""
        values = self.decision_function(x)
        index = (values[:, 0] > 0).astype(int) if values.shape[1] == 1 else values.argmax(axis=1)
        return self.classes[index]


def fit_predicted_estimator(
    estimator: Any, x: ArrayLike, labels: ArrayLike, weights: ArrayLike
) -> PredictedEstimator:
    """PredSVM (L15 eq 12) by a classifier of scikit-learn, for example `SVC(C=100,
    kernel="linear")`,
    the paper's own choice.

    **Arguments:** `estimator`, not fitted, with `fit(x, y, sample_weight)` and `decision_function`;
    it is copied for each class. `x` `[n, d]`, `labels` `[n]` and `weights` `[n]` of any sign:
    points, classes and weights of a predicted embedding. Points of weight 0 (padding) are left out.
    The weights sum to about 1, so the estimator's C corresponds to C n for n plain points.

    **Returns:** a `PredictedEstimator`. Runs outside JAX: no `jit`, no gradient;
    `fit_predicted_svm` has both.

    **Raises:** `ValueError` for fewer than two classes, or unpaired arguments.
    """
    x, labels, weights = np.asarray(x), np.asarray(labels), np.asarray(weights)
    if not x.shape[0] == labels.shape[0] == weights.shape[0]:
        raise ValueError(
            f"`x`, `labels` and `weights` have {x.shape[0]}, {labels.shape[0]} and "
            f"{weights.shape[0]} entries."
        )
    used = weights != 0
    x, labels, weights = x[used], labels[used], weights[used]
    classes = np.unique(labels)
    if classes.size < 2:
        raise ValueError(f"A classifier needs at least two classes, got {classes}.")
    fitted = []
    for positive in classes[1:] if classes.size == 2 else classes:
        flipped, size = map(np.asarray, flip_labels(np.where(labels == positive, 1, -1), weights))
        fitted.append(copy.deepcopy(estimator).fit(x, flipped, sample_weight=size))
    return PredictedEstimator(tuple(fitted), classes)
