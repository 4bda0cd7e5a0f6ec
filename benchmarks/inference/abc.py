r"""Approximate Bayesian computation from a table of simulations, in NumPy.

Rejection, and rejection with regression adjustment.
"""

import numpy as np


def nearest(
    data: np.ndarray, observed: np.ndarray, scale: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """The `most` simulations nearest to the observation, the nearest first, and their distances in
    units of `scale`.
    """
    scaled = (data - observed) / scale
    squares = np.einsum("ij,ij->i", scaled, scaled)
    index = (
        np.argpartition(squares, most - 1)[:most]
        if most < len(squares)
        else np.arange(len(squares))
    )
    index = index[np.argsort(squares[index])]
    return index, np.sqrt(squares[index])


def adjusted(
    parameters: np.ndarray, data: np.ndarray, observed: np.ndarray, distances: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Accepted parameters moved to the observation by local linear regression with Epanechnikov
    weights, and these weights (Beaumont, Zhang and Balding 2002). The tolerance is the largest
    distance.
    """
    weights = 1 - (distances / distances[-1]) ** 2
    design = np.hstack([np.ones((len(data), 1)), data - observed])
    root = np.sqrt(weights)[:, None]
    coefficients = np.linalg.lstsq(root * design, root * parameters, rcond=None)[0]
    return parameters - design[:, 1:] @ coefficients[1:], weights / weights.sum()
