"""What a filter is: `init`, `step`, and one scan over a sequence."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import (
    as_batch,
    as_count,
    as_mask,
    as_points,
    check_alike,
    check_finite,
    check_same_size,
    fill,
    in_one_precision,
    like,
    size,
    take,
    without_padding,
)
from .._numerics import AbstractFactor, matmul, safe_divide
from .._typing import Array, ArrayLike, Bool, Float, Int, Point, Points
from ..embedding import Embedding, check_unbatched
from ..features import AbstractFeatures


class FilterStep(eqx.Module):
    r"""What a step, or with a leading time axis a whole run, knows of the hidden state.

    - `weights`: the belief after the observation, `[..., n]`, on `filter.support`; `filter.belief(weights)` is its embedding.
    - `predicted`: the weights of the belief before the observation, as used (cleaned), `[..., n]`. They stand on the training
      states, also where `weights` stand on others: a `KernelBayesFilter` of form (a).
    - `evidence`: $\langle \hat\mu_{o | h}, \psi(o) \rangle$ of the normalized prediction (before any `Recovery`), how well the
      observation was foreseen; NaN where it is missing.
    - `restarted`: whether the belief was replaced because the observation contradicted it.
    """

    weights: Float[Array, "*time n"]
    predicted: Float[Array, "*time n"]
    evidence: Float[Array, "*time"]
    restarted: Bool[Array, "*time"]


class AbstractFilter(eqx.Module):
    """A recursive estimate of a hidden state.

    Fitted filters cache what their kernels imply; build them inside a loss, never replace a kernel in one. All methods
    work under `jit`, `vmap` (over observations, states, or whole filters) and `grad`.
    """

    observations: eqx.AbstractVar[AbstractFeatures]

    @abc.abstractmethod
    def init(self, prior: Embedding | None = None) -> Any:
        """State before the first observation, from a prior over hidden states; by default the training states' marginal."""

    @abc.abstractmethod
    def update(
        self, state: Any, code: Float[Array, " r"], observed: Bool[Array, ""]
    ) -> tuple[Any, Any]:
        """`step` for an observation that is already a code of `observations`."""

    def step(
        self,
        state: Any,
        observation: Point,
        observed: ArrayLike = True,
        *,
        control: Point | None = None,
    ) -> tuple[Any, Any]:
        """Advance by one observation, online.

        **Arguments:** `state` from `init` or the last step; `observation`, one point; `observed`, False for a missing
        observation (its value is then ignored, NaN included): the step only predicts; `control`, of a `ControlledFilter`, the
        input that acts from this step to the next.

        **Returns:** the state for the next step, and what is known after this one: a `FilterStep`, or a `MomentStep`.
        """
        observed = jnp.asarray(observed)
        code = self.coordinates_of(observation, observed)[None]
        controls = (
            None if control is None else jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], control)
        )
        return self.update(state, self.with_controls(code, controls)[0], observed)

    def coordinates_of(self, observation: Point, observed: ArrayLike = True) -> Float[Array, " r"]:
        """Code of one checked observation, or of a stand-in if it is missing."""
        training = self.observations.points
        batch, single = as_batch(observation, "observation", training, "training observations")
        if not single:
            raise ValueError(
                "`observation` must be one point; use `kbr_jax.filter` for a sequence."
            )
        self.observations.kernel.check(batch, "observation")
        return self.coordinates(fill(batch, jnp.asarray(observed)[None], take(training, 0)))[0]

    def coordinates(self, observations: Points) -> Float[Array, "m r"]:
        """Codes of m observations, as `update` takes them."""
        return self.observations.coordinates(observations)

    def with_controls(
        self, coordinates: Float[Array, "m r"], controls: Points | None
    ) -> Float[Array, "m q"]:
        """Codes of m observations, with those of the inputs that act after them behind, where the filter knows inputs."""
        if controls is not None:
            raise ValueError(
                f"This {type(self).__name__} was fitted without `controls`; see `ControlledFilter`."
            )
        return coordinates


class AbstractSampleFilter(AbstractFilter):
    """A filter whose belief is weights on its training states."""

    states: eqx.AbstractVar[AbstractFeatures]

    @property
    @abc.abstractmethod
    def support(self) -> Points:
        """The points `[n, ...]` that belief weights stand on."""

    @abc.abstractmethod
    def init_from_observation(self, observation: Point) -> tuple[Any, FilterStep]:
        """State after a first observation without any prior, and the belief it gives."""

    @abc.abstractmethod
    def predict(self, weights: Float[Array, "*batch n"], steps: int = 1) -> Embedding:
        """Embedding of the state `steps` transitions after a belief (static), without observations."""

    def belief(self, weights: Float[Array, "*batch n"]) -> Embedding:
        """The embedding of belief weights, on the filter's support."""
        return Embedding(self.states.kernel, self.support, weights)


def as_transitions(
    states: Points,
    observations: Points,
    successors: Points | None,
    lag: int,
    mask: ArrayLike | None = None,
) -> tuple[Points, Points, Points, Bool[Array, " n"] | None]:
    """Checked training triples `[n, ...]`: states, observations made `lag` steps later, and successors; and their mask.

    From one sequence of T observations with T or T + 1 states (the last may be unobserved), or as given with `successors`.
    A triple of a sequence counts if the mask `[number of states]` is True at its state and at its successor.
    """
    states, observations = as_points(states, "states"), as_points(observations, "observations")
    if mask is not None:
        mask = as_mask(mask, size(states), "mask")
    if successors is not None:
        successors = as_points(successors, "successors")
        check_alike(successors, "successors", states, "states")
        check_same_size(successors, "successors", states, "states")
        check_same_size(observations, "observations", states, "states")
    else:
        count = min(size(states) - 1, size(observations) - lag)
        if size(states) - size(observations) not in (0, 1) or count < 1:
            raise ValueError(
                f"`states` has {size(states)} points and `observations` {size(observations)}; a training sequence needs T "
                f"observations with T or T + 1 states, at least two states and {1 + lag} observations. For separate "
                "transitions pass `successors`."
            )
        if mask is not None:
            mask = mask[:count] & mask[1 : count + 1]
        successors = take(states, slice(1, count + 1))
        states, observations = (
            take(states, slice(count)),
            take(observations, slice(lag, lag + count)),
        )
    states, observations, successors = in_one_precision(states, observations, successors)
    states, observations, successors = (
        check_finite(without_padding(points, mask), name)
        for points, name in (
            (states, "states"),
            (observations, "observations"),
            (successors, "successors"),
        )
    )
    return states, observations, successors, mask


def most_active(
    prior: Float[Array, " n"], likelihood: Float[Array, " n"], count: int
) -> Int[Array, " k"]:
    """Indices of the `count` weights of a non-negative prior that are largest times the likelihood; those that are 0 come last."""
    likely = jnp.maximum(prior * likelihood, 0)
    return lax.top_k(jnp.where(prior > 0, 1 + safe_divide(likely, jnp.max(likely)), 0), count)[1]


def project_prior(
    features: AbstractFeatures, prior: Embedding, factor: AbstractFactor
) -> Float[Array, " n"]:
    """An embedding over states as weights on the sample of `features`, by the ridge regression of `factor`."""
    check_unbatched(prior, "prior")
    check_alike(prior.points, "prior.points", features.points, "training states")
    coordinates = features.coordinates(like(prior.points, features.points))
    return features.ridge_weights(
        factor, matmul(prior.weights.astype(coordinates.dtype), coordinates)[None]
    )[0]


def filter(
    filt: AbstractFilter,
    observations: Points,
    *,
    controls: Points | None = None,
    observed: ArrayLike | None = None,
    prior: Embedding | None = None,
    read: Callable[[Any], Any] | None = None,
    segment: int | None = None,
) -> Any:
    """Filter a sequence of observations from the start: `filt.init(prior)`, then one scan of `filt.step`.

    **Arguments:**

    - `filt`: a fitted filter.
    - `observations`: `[T, ...]`; `vmap` over a leading batch axis for many sequences.
    - `controls`: of a `ControlledFilter`, known inputs `[T, ...]`, the one at t acting from the state at t to the next; they
      are used where observations are missing, too.
    - `observed`: mask `[T]`; False marks a missing observation, whose value is ignored. All observed by default.
    - `prior`: embedding of the first hidden state; by default the marginal of the training states.
    - `read`: what to keep of each step, a function of its `FilterStep` (`MomentStep`); all of it by default. For long
      sequences `lambda step: mean(filt.belief(step.weights))` keeps d numbers a step instead of n.
    - `segment`: for gradients through long sequences: steps between two beliefs that are stored (static).

    **Returns:** a `FilterStep` (a `MomentStep` from a `MomentFilter`), or what `read` made of it, with leading axis T. The first
    call compiles; later calls of the same shapes with the same function `read` do not (a lambda written in the call is a new
    function each time). Reverse mode recomputes each step, and stores T beliefs; with a `segment`, T / segment + segment
    beliefs, least at the root of T, for one more forward pass.

    An observation so far from all training observations that each k(o_i, o) is 0 to the last digit is treated as missing, with
    evidence 0. NaN is not: mark it in `observed`, or all later beliefs are NaN.

    **Raises:** `ValueError` for observations that are not of the kind of the training observations, or a mask of another
    length.
    """
    options: dict[str, Any] = {
        "controls": controls,
        "observed": observed,
        "read": read,
        "segment": segment,
    }
    return advance(filt, filt.init(prior), observations, **options)[1]


def advance(
    filt: AbstractFilter,
    state: Any,
    observations: Points,
    *,
    controls: Points | None = None,
    observed: ArrayLike | None = None,
    read: Callable[[Any], Any] | None = None,
    segment: int | None = None,
) -> tuple[Any, Any]:
    """Filter a stretch of observations from a given state: for streams that arrive in pieces.

    **Arguments:** `state` from `filt.init`, `filt.init_from_observation`, `filt.step` or an earlier `advance`; the rest as
    `filter`. **Returns:** the state after the stretch, and a `FilterStep` with leading axis T. Raises as `filter`.
    """
    observations = as_points(observations, "observations")
    check_alike(observations, "observations", filt.observations.points, "training observations")
    filt.observations.kernel.check(observations, "observations")
    observations = like(observations, filt.observations.points)
    segment = None if segment is None else as_count(segment, "segment")
    observed = as_mask(observed, size(observations), "observed")
    return _scan(filt, state, observations, controls, observed, read, segment)


@eqx.filter_jit
def _scan(
    filt: AbstractFilter,
    state: Any,
    observations: Points,
    controls: Points | None,
    observed: Bool[Array, " T"],
    read: Callable[[Any], Any] | None,
    segment: int | None,
):
    # All observations are encoded at once, as one matrix product instead of T products with a vector.
    coordinates = filt.coordinates(fill(observations, observed, take(filt.observations.points, 0)))
    coordinates = filt.with_controls(coordinates, controls)

    def step(carry, inputs):
        carry, known = filt.update(carry, *inputs)
        return carry, known if read is None else read(known)

    def scan(carry, inputs):
        return lax.scan(jax.checkpoint(step, prevent_cse=False), carry, inputs)

    inputs = coordinates, observed
    if segment is None or segment >= size(observations):
        return scan(state, inputs)
    count = size(observations) // segment
    stored = jax.tree.map(
        lambda leaf: leaf[: count * segment].reshape(count, segment, *leaf.shape[1:]), inputs
    )
    state, first = lax.scan(jax.checkpoint(scan, prevent_cse=False), state, stored)
    first = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), first)
    if count * segment == size(observations):
        return state, first
    state, rest = scan(state, take(inputs, slice(count * segment, None)))
    return state, jax.tree.map(lambda *parts: jnp.concatenate(parts), first, rest)
