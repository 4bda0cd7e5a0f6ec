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
    as_rows,
    fit_discriminant_map,
)
from ._search import quasi_random

#: Landmarks of pixels, their bandwidth in units of the default, and the pixels that both are chosen
#: from. In the look-alike room (variance .003, filters trained on each half) the sum of what true
#: states have beyond those half a turn away, and beyond a slack of 1, exceeds 8 nats in 174 and 120
#: places of 1800 frames, and never in favor of the false ones. With 80 landmarks half as wide:
#: 156 and 111. With the coordinates of `DiscriminantMap` alone 20 and 9, and 6 and 2 in favor of
#: the false ones; with both 161 and 109, and 3 and 0.
_RANK, _WIDTH, _SAMPLE = 200, 0.4, 4000
#: Pixels of a side at most; and images that are mapped at a time.
_SIDE, _BATCH = 32, 50


class ImageMap(eqx.Module):
    r"""Coordinates of the mean embedding of an image's pixels.

    Each pixel is a point in the space of colors, the mean of 3 x 3 neighbors. The embedding
    $\frac1m \sum_i \phi(c_i)$ says which colors an image holds, wherever they are: a small object
    moves through an image, and hardly shows in a linear map of its entries. `learn_filter` makes it
    of images.

    - `pixels`: features of colors. `embedded`: coordinates of the embedding. `counts`: whether
      entries are counts, whose square roots are taken.
    - A call gives the coordinates `[r]` of an image `[h, w]` or `[h, w, c]`. Cost O(m p c) for
      m pixels, at most 1024 of them, and p landmarks.
    """

    pixels: LandmarkFeatures
    embedded: DiscriminantMap
    counts: bool = eqx.field(static=True)

    def __call__(self, image: Float[Array, "h w *c"]) -> Float[Array, " r"]:
        return self.embedded(_embedded(self.pixels, image, self.counts))


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
    values = pixels.kernel.gram(pixels.landmarks.points, _colors(image, counts, pixels.dtype))
    return pixels.of_values(jnp.mean(values, axis=1))


@eqx.filter_jit
def mapped(maps: tuple[Map, Map], observations: Points) -> Float[Array, "n r"]:
    """Coordinates of all observations by two maps, side by side."""
    return lax.map(
        lambda one: jnp.concatenate([function(one) for function in maps]),
        observations,
        batch_size=_BATCH,
    )


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


def fit_maps(
    chosen: Regression, states: Points, observations: Array
) -> tuple[DiscriminantMap, Map]:
    """What a filter's kernel sees of observations, and what a test sees.

    The kernel sees the `LEADING` coordinates of `fit_discriminant_map`. The test sees all of them,
    or of images an `ImageMap`.
    """
    entries = fit_discriminant_map(chosen, states, observations)
    counts = entries.counts
    seen = DiscriminantMap(entries.center, entries.matrix[:, :LEADING], counts)
    if observations.ndim not in (3, 4) or entries.matrix.shape[1] < LEADING:
        return seen, entries
    pixels, embedded = _fitted(observations, counts, entries.center.dtype)
    return seen, ImageMap(pixels, fit_discriminant_map(chosen, states, embedded), counts)
