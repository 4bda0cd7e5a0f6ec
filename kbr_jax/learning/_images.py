"""Learned coordinates of images that tell states apart from those that look alike."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import Partial

from .._checks import as_points, as_regularizer, check_finite, check_same_size, precision_of, take
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float, Points, PRNGKeyArray
from ..filtering._cusum import EXCLUSION
from ..filtering._discriminant import residual_operators
from ..kernels import KernelLike, kernel_for
from ..tuning import tune
from ._maps import are_counts, as_rows, block_of, distances, in_batches

#: Side of a window, hidden units of both layers, coordinates, steps of Adam and their rate, and
#: windows along a side in a step, about. In the look-alike room at variance .01 (1000 pairs of
#: the second half) the sum of what true states have beyond those half a turn away, and beyond a
#: slack of .5, exceeds 8 nats in 248 places of 1800 frames, and in none in favor of the false ones.
#: Windows of 3 pixels 66, 16 units 120, 4 coordinates 282, 150 steps 110. The same windows in all
#: steps: 182, and 108 in favor of the false ones. These are by 25 windows an image. At the worst
#: seed, 1799 pairs, false states are left after 158, 24 and 114 frames by networks of three keys
#: (median of 20 starts), by 36 windows after 24 and 16, by 100 windows, in three times the time of
#: 36, after 12 and 8. By 16 windows they are not left.
_SIDE, _HIDDEN, _OUTPUTS, STEPS, _RATE, _WINDOWS = 5, 32, 8, 300, 0.03, 6
#: Pixels of a side at most: neighbors are averaged.
_PIXELS = 32
#: One object, so that all calls share a compiled step.
_OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(_RATE, STEPS))
)
#: Degrees of freedom of Student's likelihood, as in `fit_discriminant`.
_DEGREES = 3.0


class _Network(eqx.Module):
    """Mean of three dense layers over windows, the last without a bias."""

    weights: tuple[Float[Array, "_ _"], ...]
    biases: tuple[Float[Array, " _"], ...]

    def __call__(self, windows: Float[Array, "*b m i"]) -> Float[Array, "*b o"]:
        for weight, bias in zip(self.weights, self.biases, strict=False):
            windows = jax.nn.relu(matmul(windows, weight) + bias)
        return matmul(jnp.mean(windows, axis=-2), self.weights[-1])


class ImageMap(eqx.Module):
    r"""Coordinates of an image: means of a small network over its windows of 5 x 5 pixels.

    $z = \frac1m \sum_i f(w_i) - \bar z$ does not depend on where in the image something is. A small
    object moves through an image, and hardly shows in a linear map of its entries. Make it with
    `fit_image_map`; `learn_filter` does so where it tests beliefs.

    - `center`, `scale` `[c]`: mean and standard deviation of each color. `offset`: the mean of the
      training images. `counts`: whether entries are counts, whose square roots are taken.
    - A call gives the coordinates `[8]` of an image `[h, w]` or `[h, w, c]`. Above 32 pixels of a
      side it averages neighbors. Cost O(h w (c + 1)).
    """

    network: _Network
    center: Float[Array, " c"]
    scale: Float[Array, " c"]
    offset: Float[Array, " r"]
    counts: bool = eqx.field(static=True)

    def __call__(self, image: Array) -> Float[Array, " r"]:
        pixels = _small(image[None], self.counts, self.center.dtype)
        return self.of_pixels((pixels - self.center) / self.scale)[0] - self.offset

    def of_pixels(self, pixels: Float[Array, "n h w c"]) -> Float[Array, "n r"]:
        """Means of the network over all windows of scaled images."""
        return self.network(_windows(pixels, (0, 0), (1, 1)))


def _small(images: Array, counts: bool, dtype: Any) -> Float[Array, "n h w c"]:
    """Means of neighbors, at most `_PIXELS` of each side."""
    high, wide = images.shape[1:3]
    rows = as_rows(images, counts, dtype).reshape(len(images), high, wide, -1)
    tall, broad = -(-high // _PIXELS), -(-wide // _PIXELS)
    more = (0, 0), (0, -high % tall), (0, -wide % broad), (0, 0)
    rows = jnp.pad(rows, more, mode="edge")
    shape = len(rows), rows.shape[1] // tall, tall, rows.shape[2] // broad, broad, rows.shape[3]
    return jnp.mean(rows.reshape(shape), axis=(2, 4))


def _windows(
    pixels: Float[Array, "n h w c"], corner: tuple[Any, ...], apart: tuple[int, ...]
) -> Float[Array, "n m i"]:
    """Windows whose centers are `apart`, the first at the `corner`; borders are continued."""
    half = _SIDE // 2
    count, *sides, colors = pixels.shape
    high, wide = ((side // step - 1) * step + 1 for side, step in zip(sides, apart, strict=True))
    padded = jnp.pad(pixels, ((0, 0), (half, half), (half, half), (0, 0)), mode="edge")
    size = count, high + 2 * half, wide + 2 * half, colors
    part = lax.dynamic_slice(padded, (0, *corner, 0), size)
    parts = [
        part[:, i : i + high : apart[0], j : j + wide : apart[1]]
        for i in range(_SIDE)
        for j in range(_SIDE)
    ]
    return jnp.concatenate(parts, axis=-1).reshape(count, -1, _SIDE**2 * colors)


def _initial(colors: int, key: PRNGKeyArray) -> _Network:
    sizes = (_SIDE**2 * colors, _HIDDEN, _HIDDEN, _OUTPUTS)
    keys = jax.random.split(key, 3)
    weights = [
        jax.random.normal(k, (i, o), jnp.float32) * (2 / i) ** 0.5
        for k, i, o in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]
    biases = [jnp.zeros(o, jnp.float32) for o in sizes[1:-1]]
    return _Network(tuple(weights), tuple(biases))


def _loss(
    pixels: Float[Array, "n h w c"],
    operators: tuple[Float[Array, "n n"], Float[Array, "n n"]],
    network: _Network,
    key: PRNGKeyArray,
) -> Float[Array, ""]:
    """Minus the mean log-likelihood ratio of true states to look-alikes.

    Each step draws where its windows lie: networks that see the same windows in every step learn
    the noise of single images.
    """
    apart = tuple(max(1, side // _WINDOWS) for side in pixels.shape[1:3])
    keys = jax.random.split(key)
    corner = tuple(
        jax.random.randint(k, (), 0, side - (side // step - 1) * step)
        for k, side, step in zip(keys, pixels.shape[1:3], apart, strict=True)
    )

    # All at once: for 1000 images two cores take 4.7 s and one 8.1 s; in blocks of 32 images, which
    # fit a cache, 8.0 and 7.5 s.
    rows = network(_windows(pixels, corner, apart))
    rows = rows - jnp.mean(rows, axis=0)
    own, others = (matmul(operator, rows) for operator in operators)
    unit = jnp.mean(own**2, axis=0) + jnp.finfo(rows.dtype).tiny
    gain = jnp.log1p(others**2 / unit / _DEGREES) - jnp.log1p(own**2 / unit / _DEGREES)
    return -0.5 * (_DEGREES + 1) * jnp.mean(gain)


def fit_image_map(
    kernel: KernelLike | None,
    states: Points,
    images: ArrayLike,
    codes: ArrayLike,
    *,
    key: PRNGKeyArray,
    regularizer: ArrayLike = 1e-4,
) -> ImageMap:
    r"""Learn coordinates of images that tell each state from its look-alike.

    The look-alike $r_i$ of a training state $s_i$ is the state whose codes are most like its own,
    among states whose kernel with $s_i$ is at most 5 % of its maximum; if there is none, the
    farthest state. With ridge regression m from states to the coordinates z of `ImageMap`, and its
    standardized residuals $u_i$ of the states (left out in blocks) and $v_i$ of the look-alikes,
    the network maximizes the mean of Student's log-likelihood ratio
    $2 \log(1 + v_i^2 / 3) - 2 \log(1 + u_i^2 / 3)$, both in units of the root mean square of u. The
    evidence that `fit_cusum_restart` adds up is of this kind. 300 steps of Adam, in float32.

    **Arguments:**

    - `kernel` on `states` `[n, ...]`, in order of time.
    - `images`: `[n, h, w]` or `[n, h, w, c]`, real numbers or counts (integers).
    - `codes`: `[n, p]`, coordinates in which look-alikes are near.
    - `key`: for the first weights, and for where windows lie.
    - `regularizer`: epsilon > 0 in `G + n epsilon I` of the regression.

    Cost O(n^3) once, and O(n^2 + n (c + 1)) a step: five seconds for 1 000 images on two cores.
    Memory O(n^2 + n (c + 1)): 36 windows of each image, and up to 121 of those of 11 pixels.

    **Raises:** `ValueError` for images of another shape, samples of different lengths or non-finite
    values.
    """
    states, frames = as_points(states, "states"), check_finite(jnp.asarray(images), "images")
    if frames.ndim not in (3, 4):
        raise ValueError(f"`images` must be [n, h, w] or [n, h, w, c], got {list(frames.shape)}.")
    codes = check_finite(jnp.asarray(codes), "codes")
    check_same_size(frames, "images", states, "states")
    check_same_size(codes, "codes", states, "states")
    kernel = kernel_for(kernel, states)
    kernel.check(states, "states")
    count, counts = frames.shape[0], are_counts(frames)
    pixels = _small(frames, counts, precision_of(states))
    center, scale = jnp.mean(pixels, axis=(0, 1, 2)), jnp.std(pixels, axis=(0, 1, 2))
    scale = jnp.maximum(scale, jnp.finfo(scale.dtype).tiny ** 0.5)
    pixels = (pixels - center) / scale
    gram = kernel.gram(states, states)
    noise = count * as_regularizer(regularizer, "regularizer", gram.dtype)
    far = np.asarray(gram <= EXCLUSION * kernel.diagonal(states)[:, None])
    unlike = np.where(far, distances(codes, codes), np.inf)
    farthest = np.asarray(jnp.argmin(gram, axis=1))
    rivals = take(states, np.where(far.any(axis=1), np.argmin(unlike, axis=1), farthest))
    operators = residual_operators(kernel, states, rivals, noise, block_of(count))[1:]
    first, steps = jax.random.split(key)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (pixels, operators))
    network = tune(
        Partial(_loss, *single),
        _initial(pixels.shape[-1], first),
        _OPTIMIZER,
        num_steps=STEPS,
        key=steps,
        progress=False,
    ).parameters
    network = jax.tree.map(lambda leaf: leaf.astype(pixels.dtype), network)
    found = ImageMap(network, center, scale, jnp.zeros(_OUTPUTS, pixels.dtype), counts)
    offset = jnp.mean(in_batches(found, frames), axis=0)
    return eqx.tree_at(lambda m: m.offset, found, offset)
