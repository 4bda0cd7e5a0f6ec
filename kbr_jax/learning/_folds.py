"""Held-out stretches of training sequences, as arrays of one shape."""

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._checks import size, take
from .._numerics import evenly
from .._typing import Array, Float, Points
from ..filtering import delay_embedding, transitions
from ..rules import AbstractConditional
from ._images import fit_image_map
from ._maps import (
    BLOCK,
    LEADING,
    Regression,
    distances,
    fit_discriminant_map,
    in_batches,
    in_blocks,
    predicted,
    regression,
)

#: Folds, steps of a stretch, steps of all stretches together, and pairs that are learned from while
#: choosing: 2 000 pairs then take minutes on two cores.
FOLDS, LENGTH, STEPS, PAIRS = 5, 40, 1000, 1000
#: Pairs that a map, a test of the belief and a readout are fitted to.
MAPPED = 2000
#: Observations of the window that regressions see.
WINDOW = 4


class Fold(eqx.Module):
    """What one split learns from, and the stretches `[w, l, ...]` that it is tested on.

    - `states`, `codes`, `successors`: training triples `[m, ...]`, observations as coordinates of
      `fit_discriminant_map`.
    - `history`, `query_history`: the last observations, for regressions on a window.
    - `truth`, `queries`: states and coordinates of the observations of w stretches of l steps.
    - `redrawn`: the same observations with noise of another time at a similar state.
    - `wrong`: for each stretch a far state whose observation is most like its first.
    - `leading`: how many coordinates kernels see; tests of beliefs see all, of images the others.
      None where observations are as they are.
    - `images`: training observations and queries as they are, where these are images. Their codes
      are the leading ones, until `with_image_codes` adds the others.
    - `whole`: what a readout learns from, where observations are mapped: states, all coordinates
      and those of the stretches, of at most `MAPPED` pairs.
    """

    states: Points
    codes: Any
    successors: Points
    truth: Points
    queries: Any
    redrawn: Any
    wrong: Points
    history: Any
    query_history: Any
    leading: int | None = eqx.field(static=True)
    images: tuple[Array, Array] | None = None
    whole: tuple[Array, Array, Array] | None = None

    def seen(self, coordinates: Any) -> Any:
        """What kernels see of coordinates."""
        return coordinates if self.leading is None else coordinates[..., : self.leading]


Sequence = tuple[Points, Points]


def split(states: Any, observations: Any) -> list[tuple[list[Sequence], list[Sequence]]]:
    """For each fold the sequences to learn from, and those held out.

    They are whole trajectories where at least `FOLDS` are not short, and stretches of them
    otherwise.
    """
    if not isinstance(states, list):
        states, observations = [states], [observations]
    # One step alone is no transition.
    pairs = [pair for pair in zip(states, observations, strict=True) if size(pair[1]) > 1]
    states, observations = zip(*pairs, strict=True)
    lengths = [size(one) for one in observations]
    # Stretches of all folds are as long as the shortest of the folds' longest sequences.
    longest = sorted(lengths, reverse=True)
    whole = len(lengths) >= FOLDS and 2 * longest[FOLDS - 1] >= min(LENGTH, longest[0])
    blocks = []
    for index, length in enumerate(lengths):
        parts = 1 if whole else max(1, round(FOLDS * length / sum(lengths)))
        cuts = np.linspace(0, length, parts + 1).astype(int).tolist()
        blocks += [(index, a, b) for a, b in itertools.pairwise(cuts)]
    held_out = _dealt([b - a for _, a, b in blocks])
    count = max(held_out) + 1

    def part(index, start, stop):
        rows = slice(start, stop)
        return take(states[index], rows), take(observations[index], rows)

    folds = []
    for fold in range(count):
        learn: list[tuple[int, int, int]] = []
        for number, (index, start, stop) in enumerate(blocks):
            if held_out[number] == fold:
                continue
            if learn and learn[-1][0] == index and learn[-1][2] == start:
                start = learn.pop()[1]
            learn.append((index, start, stop))
        learn = [b for b in learn if b[2] - b[1] > 1]
        tests = [part(*b) for b, own in zip(blocks, held_out, strict=True) if own == fold]
        folds.append(([part(*b) for b in learn], tests))
    return folds


def _dealt(lengths: list[int]) -> list[int]:
    """The fold of each block: the longest first, each to the fold with the fewest steps.

    As many folds as have a block of half the length of the second longest, or of a stretch.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    least = min(LENGTH, lengths[order[min(1, len(order) - 1)]]) / 2
    count = min(FOLDS, sum(length >= least for length in lengths))
    steps, folds = [0] * count, [0] * len(lengths)
    for number in order:
        folds[number] = int(np.argmin(steps))
        steps[folds[number]] += lengths[number]
    # In the order of their first blocks.
    names = {fold: place for place, fold in enumerate(dict.fromkeys(folds))}
    return [names[fold] for fold in folds]


def spread(total: int, count: int) -> np.ndarray:
    """At most `count` of `total` rows, evenly spaced, of a number that blocks divide."""
    return evenly(total, in_blocks(min(total, count)))


def make_folds(states: Any, observations: Any, chosen: Regression | None) -> Fold:
    """The folds, stacked along a leading axis.

    `chosen` is the kernel and the ridge of the regression that `fit_discriminant_map` takes, or
    None to leave the observations as they are.
    """
    splits = split(states, observations)
    triples = [transitions([s for s, _ in learn], [o for _, o in learn]) for learn, _ in splits]
    least = min(size(triple[0]) for triple in triples)
    pairs, mapped = in_blocks(min(PAIRS, least)), in_blocks(min(MAPPED, least))
    held_out = [[one for one in tests if size(one[1]) > 1] for _, tests in splits]
    length = min(LENGTH, *(max(size(one[1]) for one in tests) for tests in held_out))
    windows = [_windows(tests, length) for tests in held_out]
    count = max(1, min(STEPS // (length * len(splits)), *(len(w) for w in windows)))
    folds = []
    for (learn, _), triple, candidates in zip(splits, triples, windows, strict=True):
        picked = [candidates[i] for i in np.linspace(0, len(candidates) - 1, count).astype(int)]
        rows, more = spread(size(triple[0]), pairs), spread(size(triple[0]), mapped)
        folds.append(_fold(learn, rows, more, picked, chosen))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *folds)


def _windows(tests: list[Sequence], length: int) -> list[Sequence]:
    """Stretches of one length, side by side."""
    return [
        take(one, slice(start, start + length))
        for one in tests
        for start in range(0, size(one[1]) - length + 1, length)
    ]


def _fold(
    learn: list[Sequence],
    rows: np.ndarray,
    more: np.ndarray,
    windows: list[Sequence],
    chosen: Regression | None,
) -> Fold:
    sequences, seen = [s for s, _ in learn], [o for _, o in learn]
    states, observations, successors = take(transitions(sequences, seen), rows)
    truth, queries = jax.tree.map(lambda *leaves: jnp.stack(leaves), *windows)
    count = images = whole = None
    if chosen is None:
        codes, redrawn = observations, queries
    else:
        function = fit_discriminant_map(chosen, states, observations)
        known, asked = take(transitions(sequences, seen)[:2], more)
        every = function if len(more) == len(rows) else fit_discriminant_map(chosen, known, asked)
        whole = known, in_batches(every, asked), _of_stretches(every, queries)
        count = min(LEADING, function.matrix.shape[1])
        if observations.ndim in (3, 4):
            images, function = (observations, queries), function.leading(count)
        seen = [in_batches(function, one) for one in seen]
        codes = transitions(sequences, seen)[1][rows]
        queries = _of_stretches(function, queries)
        redrawn = _with_other_noise(regression(chosen, states, codes), truth, queries)
    history = query_history = None

    def look(codes):
        return codes if count is None else codes[..., :count]

    if isinstance(queries, jax.Array):
        windows = delay_embedding([look(one) for one in seen], WINDOW)
        history = transitions(sequences, windows)[1][rows]
        query_history = jnp.stack(delay_embedding(list(look(queries)), WINDOW))
    apart = distances(truth[:, 0], states)
    unlike = distances(look(queries[:, 0]), look(codes))
    far = apart >= np.median(apart, axis=1, keepdims=True)
    wrong = states[np.argmin(np.where(far, unlike, np.inf), axis=1)]
    runs = truth, queries, redrawn, wrong
    return Fold(states, codes, successors, *runs, history, query_history, count, images, whole)


def _of_stretches(function: Callable, queries: Points) -> Float[Array, "w l r"]:
    flat = in_batches(function, queries.reshape(-1, *queries.shape[2:]))
    return flat.reshape(*queries.shape[:2], -1)


def with_image_codes(chosen: Regression, folds: Fold) -> Fold:
    """The folds with coordinates of `fit_image_map` behind those that kernels see."""

    def one(fold: Fold) -> Fold:
        images, queries = fold.images  # pyright: ignore[reportGeneralTypeIssues]
        codes = fold.seen(fold.codes)
        key = jax.random.key(0)
        function = fit_image_map(chosen[0], fold.states, images, codes, key=key)
        more, asked = in_batches(function, images), _of_stretches(function, queries)
        redrawn = _with_other_noise(regression(chosen, fold.states, more), fold.truth, asked)
        return eqx.tree_at(
            lambda f: (f.codes, f.queries, f.redrawn),
            fold,
            [
                jnp.concatenate(parts, axis=-1)
                for parts in (
                    (codes, more),
                    (fold.seen(fold.queries), asked),
                    (fold.seen(fold.redrawn), redrawn),
                )
            ],
        )

    found = [one(take(folds, index)) for index in range(folds.truth.shape[0])]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)


def _with_other_noise(model: AbstractConditional, truth: Points, seen: Array) -> Array:
    """Coordinates of observations with the noise of another held-out step at a similar state.

    The noise of a training pair would give that pair away.
    """
    flat = truth.reshape(-1, *truth.shape[2:])
    expected, count = predicted(model, flat), len(flat)
    noise = seen.reshape(count, -1) - expected
    reach = min(BLOCK, max(1, count // 2))
    near = np.abs(np.subtract.outer(np.arange(count), np.arange(count))) < reach
    other = np.argmin(np.where(near, np.inf, distances(flat, flat)), axis=1)
    return (expected + noise[other]).reshape(seen.shape)
