r"""Kernel density estimation with importance weights: the baseline of F11 section 5.1, in NumPy.

With Gaussian densities of one bandwidth h for x and y, the likelihood is
$\hat p(y | x) = \sum_i N(x; x_i, h^2) N(y; y_i, h^2) / \sum_i N(x; x_i, h^2)$, and each point $u_j$
of the prior's sample gets a weight in proportion to $\hat p(y | u_j)$. In many dimensions the
densities under- and overflow: everything is a log-sum-exp.
"""

import numpy as np
from scipy.spatial.distance import cdist, pdist
from scipy.special import logsumexp


def posterior_means(
    x: np.ndarray, y: np.ndarray, prior: np.ndarray, tests: np.ndarray, h: float
) -> np.ndarray:
    """Means of the weighted sample for each observation in `tests`."""
    near = -cdist(prior, x, "sqeuclidean") / (2 * h**2)
    near -= logsumexp(near, axis=1, keepdims=True)
    alike = -cdist(tests, y, "sqeuclidean") / (2 * h**2)
    # A stable product of two matrices given by logarithms: each row is scaled by its largest entry.
    top_alike, top_near = alike.max(1, keepdims=True), near.max(1, keepdims=True)
    with np.errstate(divide="ignore"):
        log_weights = np.log(np.exp(alike - top_alike) @ np.exp(near - top_near).T) + top_near.T
    # Where the two scalings leave nothing, sum that row exactly.
    for row in np.flatnonzero(~np.isfinite(log_weights).all(1)):
        log_weights[row] = logsumexp(alike[row] - top_alike[row] + near, axis=1)
    weights = np.exp(log_weights - logsumexp(log_weights, axis=1, keepdims=True))
    return weights @ prior


def least_squares_scores(points: np.ndarray, bandwidths: np.ndarray) -> np.ndarray:
    r"""Least-squares cross-validation (Rudemo 1982, Bowman 1984) of Gaussian density estimates with
    each bandwidth,

    $$ \int \hat p^2 - \frac2n \sum_i \hat p_{-i}(z_i), $$

    as ranks of the scores, since the scores themselves leave the range of numbers.
    """
    n, d = points.shape
    squares = pdist(points, "sqeuclidean")
    # log of sum over pairs i != j (each counted twice) of N(z_i - z_j; 0, s^2 I), without (2
    # pi)^(-d / 2).
    signs, logs = [], []
    for h in bandwidths:
        wide = 2 * h**2
        square = np.logaddexp(
            np.log(n) - d / 2 * np.log(wide),
            np.log(2) + logsumexp(-squares / (2 * wide)) - d / 2 * np.log(wide),
        )
        cross = np.log(2) + logsumexp(-squares / wide) - d * np.log(h)
        terms = np.array([square - 2 * np.log(n), np.log(2) + cross - np.log(n) - np.log(n - 1)])
        log, sign = logsumexp(terms, b=[1, -1], return_sign=True)
        signs.append(sign)
        logs.append(log)
    return np.argsort(np.lexsort((np.multiply(signs, logs), signs))).astype(float)
