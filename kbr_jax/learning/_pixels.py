"""What images hold, wherever it is: the mean embedding of their pixels."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax

from .._checks import take
from .._numerics import evenly
from .._typing import Array, Float, Points
from ..features import LandmarkFeatures, greedy_landmarks, landmark_features
from ..kernels import Gaussian, default_kernel
from ._maps import (
    LEADING,
    DiscriminantMap,
    Regression,
    are_counts,
    as_rows,
    fit_discriminant_map,
)
from ._search import quasi_random

#: Landmarks of pixels, their bandwidth in units of the default, and the pixels that both are chosen
#: from. In the look-alike room, filters trained on each half, true states are told from those half
#: a turn away often enough to exceed 8 nats beyond slacks of 3 in 195 and 161 places of 1800
#: frames, never in favor of the false ones; with 40 landmarks twice as wide in 177 and 135, a
#: quarter as wide in 25 and 6, of pixels without their neighbors in 196 and 127, with the 100
#: coordinates of `DiscriminantMap` alone in 54 and 32, with both in 229 and 166.
_RANK, _WIDTH, _SAMPLE = 80, 0.2, 4000
#: Pixels of a side at most; and images that are mapped at a time.
_SIDE, _BATCH = 32, 50


class ImageMap(eqx.Module):
    r"""Coordinates of an image: of its entries, and of the mean embedding of its pixels.

    Each pixel is a point in the space of colors, the mean of 3 x 3 neighbors. The embedding
    $\frac1m \sum_i \phi(c_i)$ says which colors an image holds, wherever they are: a small object
    moves through an image, and hardly shows in a linear map of its entries. Both have a
    `DiscriminantMap`. `learn_filter` makes it of images.

    - `entries`, `embedded`: these maps. `pixels`: features of colors.
    - A call gives the coordinates `[r]` of an image `[h, w]` or `[h, w, c]`. Cost O(m p c) for
      m pixels, at most 1024 of them, and p landmarks.
    """

    entries: DiscriminantMap
    pixels: LandmarkFeatures
    embedded: DiscriminantMap

    def __call__(self, image: Float[Array, "h w *c"]) -> Float[Array, " r"]:
        seen = self.embedded(_embedded(self.pixels, image, self.entries.counts))
        return jnp.concatenate([self.entries(image), seen])


Map = DiscriminantMap | ImageMap


def _colors(image: Array, counts: bool, dtype) -> Float[Array, "m c"]:
    """Means of neighbors, at most `_SIDE` of each side."""
    shape = (*image.shape[:2], -1)
    image = as_rows(image[None], counts, dtype)[0].reshape(shape)
    padded = jnp.pad(image, ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
    means = (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 3
    high, wide = (-(-side // _SIDE) for side in means.shape[:2])
    return means[::high, ::wide].reshape(-1, means.shape[2])


def _embedded(pixels: LandmarkFeatures, image: Array, counts: bool) -> Float[Array, " r"]:
    return jnp.mean(pixels.coordinates(_colors(image, counts, pixels.dtype)), axis=0)


@eqx.filter_jit
def mapped(function: Map, observations: Points) -> Float[Array, "n r"]:
    """Coordinates of all observations."""
    return lax.map(function, observations, batch_size=_BATCH)


@eqx.filter_jit
def _fitted(observations: Array, counts: bool, dtype) -> tuple[LandmarkFeatures, Array]:
    """Features of the pixels, and embeddings of all images."""

    def colors(image):
        return _colors(image, counts, dtype)

    some = lax.map(colors, take(observations, evenly(len(observations), 10 * _BATCH)))
    some = some.reshape(-1, some.shape[-1])
    # Evenly spaced pixels would all be of a few columns.
    rows = quasi_random(_SAMPLE, 1)[:, 0] * len(some)
    some = take(some, rows.astype(int))
    kernel = default_kernel(some)
    kernel = Gaussian(_WIDTH * kernel.bandwidth)  # pyright: ignore[reportAttributeAccessIssue]
    chosen = greedy_landmarks(kernel, some, rank=min(_RANK, len(some)))
    pixels = landmark_features(kernel, chosen.points, chosen)
    return pixels, lax.map(
        lambda image: _embedded(pixels, image, counts), observations, batch_size=_BATCH
    )


def fit_map(chosen: Regression, states: Points, observations: Array) -> Map:
    """As `fit_discriminant_map`; of images an `ImageMap`."""
    entries = fit_discriminant_map(chosen, states, observations)
    if observations.ndim not in (3, 4) or entries.matrix.shape[1] < LEADING:
        return entries
    pixels, embedded = _fitted(observations, are_counts(observations), entries.center.dtype)
    return ImageMap(entries, pixels, fit_discriminant_map(chosen, states, embedded))
