"""Learned coordinates of images: what they do not see, what they are trained for, and in folds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness

import kbr_jax as kbr
from kbr_jax.filtering._discriminant import residual_operators
from kbr_jax.learning import (
    ImageMap,
    _candidates,
    _filter,
    _folds,
    _images,
    _maps,
    fit_image_map,
)

KEY = jax.random.key(0)
close = closeness(1e-9, 1e-12)


def lamps(count=120, side=8, seed=0):
    """States on a circle. Opposite ones look alike but for a lamp, red or green, at any place."""
    rng = np.random.default_rng(seed)
    angle = np.cumsum(0.3 + 0.05 * rng.normal(size=count))
    states = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    images = np.full((count, side, side, 3), 0.5)
    images += 0.1 * np.cos(2 * angle)[:, None, None, None] * np.linspace(0, 1, side)[:, None]
    place = rng.integers(0, side - 1, size=(count, 2))
    for image, (row, column), red in zip(images, place, np.cos(angle), strict=True):
        image[row : row + 2, column : column + 2] += 0.3 * red * np.array([1, -1, 0])
    codes = np.stack([np.cos(2 * angle), np.sin(2 * angle)], axis=1)
    return states, images + 0.02 * rng.normal(size=images.shape), codes


def untrained(colors=3):
    ones = jnp.ones(colors)
    network = jax.tree.map(lambda leaf: leaf.astype(ones.dtype), _images._initial(colors, KEY))
    return ImageMap(network, 0 * ones, ones, jnp.zeros(8), False)


def test_coordinates_do_not_say_where_something_is():
    images = np.full((2, 12, 12, 3), 0.5)
    images[0, 3:5, 3:6] = images[1, 7:9, 4:7] = [0.9, 0.1, 0.4]
    one, other = (np.asarray(untrained()(jnp.asarray(image))) for image in images)
    close(one, other, 1e-5)
    assert np.abs(one - untrained()(jnp.full((12, 12, 3), 0.5))).max() > 1e-3


def test_coordinates_by_loops():
    rng = np.random.default_rng(1)
    found, image = untrained(1), rng.normal(size=(4, 6))
    padded = np.pad(image, 2, mode="edge")
    values = []
    for i in range(4):
        for j in range(6):
            unit = padded[i : i + 5, j : j + 5].reshape(-1)
            for weight, bias in zip(found.network.weights, found.network.biases, strict=False):
                unit = np.maximum(unit @ np.asarray(weight) + np.asarray(bias), 0)
            values.append(unit @ np.asarray(found.network.weights[-1]))
    close(found(jnp.asarray(image)), np.mean(values, axis=0), 1e-5)


@pytest.mark.parametrize(("shape", "small"), [((70, 33), (24, 17)), ((32, 31, 2), (32, 31))])
def test_large_images_are_averaged(shape, small):
    image = np.random.default_rng(2).uniform(size=shape)
    found = np.asarray(_images._small(jnp.asarray(image[None]), False, None))[0]
    assert found.shape[:2] == small
    if small[0] < shape[0]:
        close(found[3, 4, 0], image[9:12, 8:10].mean())
        close(found[-1, -1, 0], image[69:, 32:].mean())


def test_the_loss_is_the_evidence_for_look_alikes():
    """Images of five pixels a side: every step sees all windows."""
    rng = np.random.default_rng(3)
    states, rivals = rng.normal(size=(2, 20, 2))
    images = rng.normal(size=(20, 5, 5, 1))
    kernel, network = kbr.Gaussian(0.8), untrained(1).network
    operators = residual_operators(
        kernel, jnp.asarray(states), jnp.asarray(rivals), jnp.asarray(0.2), 5
    )
    rows = np.asarray(untrained(1).of_pixels(jnp.asarray(images)))
    rows = rows - rows.mean(0)
    gram = np.asarray(kbr.gram(kernel, jnp.asarray(states))) + 0.2 * np.eye(20)
    columns = np.asarray(kbr.gram(kernel, jnp.asarray(rivals), jnp.asarray(states)))
    inverse = np.linalg.inv(gram)
    variances = 1.2 - np.einsum("ij,jk,ik->i", columns, inverse, columns)
    others = (rows - columns @ inverse @ rows) / np.sqrt(variances)[:, None]
    own = np.zeros_like(rows)
    for start in range(0, 20, 5):
        part, rest = np.arange(start, start + 5), np.delete(np.arange(20), slice(start, start + 5))
        weights = gram[np.ix_(part, rest)] @ np.linalg.inv(gram[np.ix_(rest, rest)])
        variance = np.diagonal(gram[np.ix_(part, part)] - weights @ gram[np.ix_(rest, part)])
        own[part] = (rows[part] - weights @ rows[rest]) / np.sqrt(variance)[:, None]
    unit = (own**2).mean(0)
    gain = 2 * (np.log1p(others**2 / unit / 3) - np.log1p(own**2 / unit / 3))
    found = _images._loss(jnp.asarray(images), operators[1:], network, KEY)
    close(found, -gain.mean(), 1e-4)


def test_it_learns_what_tells_look_alikes_apart():
    states, images, codes = lamps()
    kernel = kbr.Gaussian(0.5)
    known = tuple(map(jnp.asarray, (states[:80], images[:80], codes[:80])))
    found = fit_image_map(kernel, *known, key=KEY)
    assert found.center.dtype == images.dtype
    values = np.asarray(_maps.in_batches(found, jnp.asarray(images)))
    close(values[:80].mean(0), 0, 1e-6)
    # The lamp's color is the first coordinate of the state, in images that were not seen.
    design = np.column_stack([values, np.ones(len(values))])
    weights = np.linalg.lstsq(design[:80], states[:80, 0], rcond=None)[0]
    assert np.corrcoef(design[80:] @ weights, states[80:, 0])[0, 1] > 0.9
    again = fit_image_map(kernel, *known, key=KEY)
    np.testing.assert_array_equal(again.offset, found.offset)


@pytest.fixture
def untrained_maps(monkeypatch):
    monkeypatch.setattr(_images, "STEPS", 1)


def test_tests_of_beliefs_in_folds_see_learned_coordinates(untrained_maps):
    states, images, _ = lamps(200)
    chosen = kbr.Gaussian(0.5), 1e-3
    folds = _folds.make_folds(jnp.asarray(states), jnp.asarray(images), chosen)
    assert folds.codes.shape[-1] == folds.leading == _maps.LEADING
    found = _folds.with_image_codes(chosen, folds)
    for name in ("codes", "queries", "redrawn"):
        old, new = getattr(folds, name), getattr(found, name)
        assert new.shape == (*old.shape[:-1], _maps.LEADING + 8)
        close(found.seen(new), old)
    rows = _folds.make_folds(jnp.asarray(states), jnp.asarray(images.reshape(200, -1)), chosen)
    assert rows.images is None and rows.codes.shape[-1] > _maps.LEADING


def test_images_of_a_filter_are_mapped_where_beliefs_are_tested(untrained_maps):
    states, images, _ = (jnp.asarray(part) for part in lamps())
    one, chosen = jnp.asarray(1.0), (kbr.Gaussian(0.5), 1e-3)
    function = _maps.fit_discriminant_map(chosen, states, images)

    def views(observations, tested):
        setting = _filter.Setting(one, one, None, None, None, "pairs", one, chosen, tested=tested)
        return _filter._views(setting, chosen, function, states, observations)

    assert views(images, False)[1] is function
    seen, tested = views(images, True)
    assert isinstance(tested, ImageMap) and seen.matrix.shape[1] == _maps.LEADING
    assert views(images.reshape(120, -1), True)[1] is function


@pytest.mark.parametrize(
    ("error", "begun", "chosen"), [(1.0, 0.59, True), (1.01, 0.5, False), (0.9, 0.61, False)]
)
def test_a_test_of_beliefs_must_earn_its_place(monkeypatch, untrained_maps, error, begun, chosen):
    """It may lose a tenth of the error without memory, here 1, in runs from the true state, .5."""

    def mean_of_folds(setting, folds, values, filters):
        assert filters == [learned if setting.tested else None] * 5
        if setting.tested:
            found = [0.2, begun, 3 * error - begun - 0.2, begun, 1.0]
            return np.array(found), (jnp.ones((1, 3, 2, 2)),) * 4
        return np.array([0.5, 0.5, 2.0, 0.5, 3.0]), (jnp.zeros((1, 3, 2, 2)),) * 4

    monkeypatch.setattr(_candidates, "_mean_of_folds", mean_of_folds)
    learned = kbr.fit_filter(
        None, None, jnp.eye(3), jnp.eye(3), regularizer=1.0, posterior_regularizer=1.0
    )
    monkeypatch.setattr(_candidates, "_fitted", lambda *_: learned)
    monkeypatch.setattr(_candidates, "LEAST", 50)
    states, images, _ = (jnp.asarray(part) for part in lamps())
    one, regression = jnp.asarray(1.0), (kbr.Gaussian(0.5), 1e-3)
    setting = _filter.Setting(one, one, None, None, None, "pairs", one, regression)
    folds = _folds.make_folds(states, images, regression)
    found, seen, runs, _ = _candidates.recovering(setting, folds, {})
    assert found.tested == chosen
    assert seen.codes.shape[-1] == _maps.LEADING + 8 * chosen
    close(runs[0], jnp.full((1, 3, 2, 2), float(chosen)))


@pytest.mark.parametrize("width", [0.3, 100.0])
def test_states_and_images_of_any_precision_and_distance(untrained_maps, width):
    """With the wide kernel no state is far: the farthest ones are the look-alikes."""
    states, images, codes = lamps(40)
    seen = []
    original = _images.residual_operators

    def operators(kernel, states, rivals, noise, block):
        seen.append(np.asarray(rivals))
        return original(kernel, states, rivals, noise, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_images, "residual_operators", operators)
        found = fit_image_map(
            kbr.Gaussian(width),
            jnp.asarray(states, jnp.float32),
            (255 * images).astype(np.uint8),
            codes,
            key=KEY,
        )
    assert found.counts and bool(jnp.all(jnp.isfinite(found.offset)))
    apart = np.linalg.norm(seen[0] - states, axis=1)
    assert apart.min() > 0.7
    if width > 1:
        every = np.linalg.norm(states[:, None] - states[None], axis=-1)
        close(apart, every.max(axis=1), 1e-2)


@pytest.mark.parametrize(
    ("images", "codes", "message"),
    [
        (jnp.zeros((9, 4)), jnp.zeros((9, 1)), r"`images` must be \[n, h, w\]"),
        (jnp.zeros((8, 4, 4)), jnp.zeros((9, 1)), "`images`"),
        (jnp.zeros((9, 4, 4)), jnp.zeros((8, 1)), "`codes`"),
        (jnp.full((9, 4, 4), jnp.nan), jnp.zeros((9, 1)), "`images`"),
    ],
)
def test_errors(images, codes, message):
    with pytest.raises(ValueError, match=message):
        fit_image_map(kbr.Gaussian(1.0), jnp.arange(9.0), images, codes, key=KEY)
