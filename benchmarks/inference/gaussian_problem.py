r"""The Gaussian problem of F11 sections 5.1 and 5.2, whose posterior is known: data, prior,
likelihood, in NumPy.

(X, Y) is normal in d + d dimensions with means (0, 1) and covariance $V = A^\top A + 2 I$, A
standard normal; the prior is $N(0, V_{XX} / 2)$, so that it is not the marginal of X.
"""

from typing import NamedTuple

import numpy as np


class GaussianProblem(NamedTuple):
    """One draw of the problem.

    Covariances of X, the prior and the noise, and the matrix of the regression of Y on X.
    """

    covariance: np.ndarray
    prior: np.ndarray
    slope: np.ndarray
    noise: np.ndarray

    def pairs(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws of (X, Y), with X from its own marginal."""
        x = draw(self.covariance, n, rng)
        return x, self.simulate(x, rng)

    def simulate(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Y given each x."""
        return 1 + x @ self.slope.T + draw(self.noise, len(x), rng)

    def observations(self, n: int, rng: np.random.Generator) -> np.ndarray:
        r"""The places at which posterior means are asked for, $N(0, V_{YY})$."""
        return draw(self.slope @ self.covariance @ self.slope.T + self.noise, n, rng)

    def posterior_mean(self, y: np.ndarray) -> np.ndarray:
        """Exact, one row for each y."""
        gain = np.linalg.solve(
            self.slope @ self.prior @ self.slope.T + self.noise, self.slope @ self.prior
        ).T
        return (y - 1) @ gain.T


def draw(covariance: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(n, len(covariance))) @ np.linalg.cholesky(covariance).T


def make(d: int, rng: np.random.Generator) -> GaussianProblem:
    root = rng.normal(size=(2 * d, 2 * d))
    v = root.T @ root + 2 * np.eye(2 * d)
    slope = np.linalg.solve(v[:d, :d], v[:d, d:]).T
    return GaussianProblem(v[:d, :d], v[:d, :d] / 2, slope, v[d:, d:] - slope @ v[:d, d:])
