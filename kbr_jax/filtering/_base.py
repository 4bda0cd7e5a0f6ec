"""What a filter is, and the verbs that act on every filter: one scan of predict and update."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from .._checks import as_arrays, as_count, as_points, as_positive, take
from .._typing import Array, ArrayLike, Bool, Float, Point, Points, with_numbers, with_scalars
from ..devices import over_devices
from ..embedding import Embedding
from ..kernels import AbstractKernel
from ._sequences import as_known, check_lists, check_values, padded_sequences
from ._smoothers import AbstractSmoother


class FilterOutput(eqx.Module):
    r"""What a step, or a run with a leading time axis, knows of the state.

    - `weights`: the belief after the observation, which `belief(filt, output)` embeds: an array
      `[..., n]` on the training sample, or `MomentWeights`.
    - `predicted`: weights of the belief before the observation, as Bayes' rule uses them.
    - `predictive_value`: $\langle \hat\mu_{o | h}, \psi(o) \rangle$ of the normalized prediction,
      how well the observation was foreseen. NaN where it is missing.
    - `restarted`: whether the belief was replaced, by a `CusumRestartFilter`.
    - `correction`: what a `ReadoutFilter` adds to the belief's mean, else None.
    - `state`: the state after the last step, for `run_filter(..., state=)`.
    """

    weights: Any
    predicted: Float[Array, "*time n"]
    predictive_value: Float[Array, "*time"]
    restarted: Bool[Array, "*time"]
    correction: Any = None
    state: Any = None

    __repr__ = with_numbers


def step_output(weights: Any, predicted: Array, value: Array) -> FilterOutput:
    """What a step knows that replaces no belief."""
    return FilterOutput(weights, predicted, value, jnp.asarray(False))


class AbstractFilter(eqx.Module):
    """A recursive estimate of a hidden state.

    A fitted filter stores what its kernels imply: fit inside a loss. Filters are pytrees. The verbs
    of this module take them under `jit`, `vmap` (of observations, states or filters) and `grad`.
    """

    __repr__ = with_scalars

    @abc.abstractmethod
    def init(self, prior: Embedding | None) -> Any:
        """State before the first observation."""

    @abc.abstractmethod
    def kernels(self) -> tuple[AbstractKernel | None, AbstractKernel | None]:
        """The kernel of observations and that of inputs, or None for a known function."""

    @abc.abstractmethod
    def encode(
        self, observations: Points, observed: ArrayLike | None, name: str = "observations"
    ) -> tuple[Any, Array]:
        """What `update` needs of each of m checked observations; the mask of those made."""

    @abc.abstractmethod
    def encode_controls(self, controls: Points | None, count: int) -> Any:
        """What `update` needs of each of `count` checked inputs."""

    @abc.abstractmethod
    def update(
        self, state: Any, code: Any, control: Any, observed: Bool[Array, ""]
    ) -> tuple[Any, FilterOutput]:
        """One step. A `code` of None is a step without an observation."""

    @abc.abstractmethod
    def advance(self, weights: Any, control: Any) -> Any:
        """The state after a belief."""

    @abc.abstractmethod
    def start(self, code: Any, regularizer: Array) -> FilterOutput:
        """What one observation without a prior says."""

    @abc.abstractmethod
    def embed(self, weights: Any) -> Embedding:
        """A belief as an embedding over states."""

    @abc.abstractmethod
    def mean(self, weights: Any) -> Any:
        """Mean of the state under a belief."""

    @abc.abstractmethod
    def smoother(self, points: Points) -> AbstractSmoother:
        """The transition from beliefs on the given points, for `smooth`."""


class AbstractWrappedFilter(AbstractFilter):
    """A filter whose beliefs are those of another, `base`, with other steps."""

    base: eqx.AbstractVar[AbstractFilter]

    @property
    def emission(self) -> Any:
        """The emission model of the base."""
        base: Any = self.base
        return base.emission

    def kernels(self) -> tuple[AbstractKernel | None, AbstractKernel | None]:
        return self.base.kernels()

    def encode_controls(self, controls: Points | None, count: int) -> Any:
        return self.base.encode_controls(controls, count)

    def embed(self, weights: Any) -> Embedding:
        return self.base.embed(weights)

    def mean(self, weights: Any) -> Any:
        return self.base.mean(weights)

    def smoother(self, points: Points) -> AbstractSmoother:
        return self.base.smoother(points)


def no_controls(controls: Points | None) -> None:
    """Raise a `ValueError` for inputs that the transition does not take."""
    if controls is not None:
        raise ValueError(
            "The transition of this filter takes no `controls`: fit P(s' | (s, u)) with x = "
            "(states, inputs) and kernel_x = TensorProduct((kernel_states, kernel_inputs))."
        )


def init_filter(filt: AbstractFilter, prior: Embedding | None = None) -> Any:
    """Return the state before the first observation.

    `prior` embeds the first hidden state: by default the marginal of the training states.
    """
    return filt.init(prior)


def filter_step(
    filt: AbstractFilter,
    state: Any,
    observation: Point,
    *,
    control: Point | None = None,
    observed: ArrayLike = True,
) -> tuple[Any, FilterOutput]:
    """Advance by one observation, online: `jax.jit(filter_step)(filt, state, observation)`.

    **Arguments:** `state` from `init_filter` or the last step; `observation`, one point; `control`,
    the input that acts from this step to the next; `observed`, False for a missing observation (its
    value, NaN included, is ignored).

    **Returns:** the next state, and a `FilterOutput`. Cost: see the filter. **Raises:**
    `ValueError` for an observation or input of another kind than in training.
    """
    code, control, mask = _encoded(filt, observation, control, jnp.asarray(observed)[None])
    return _update(filt, state, code, control, mask)


_update = eqx.filter_jit(lambda filt, *arguments: filt.update(*arguments))


def init_from_observation(
    filt: AbstractFilter,
    observation: Point,
    *,
    regularizer: ArrayLike,
    control: Point | None = None,
) -> tuple[Any, FilterOutput]:
    r"""Start from a first observation without a prior (F11 eq 10).

    The belief is $(K + n \varepsilon I)^{-1} k(O, o)$. An observation beyond the reach of the
    kernel leaves the training marginal.

    **Arguments:** `observation`; `regularizer` epsilon > 0; `control`, the input acting after it.

    **Returns:** the state for the second observation, and a `FilterOutput`, whose
    `predictive_value` is NaN for moments. Cost O(n^3) exact, O(n r^2 + r^3) with landmarks.
    """
    code, control, _ = _encoded(filt, observation, control, None)
    return _start(filt, as_positive(regularizer, "regularizer", scalar=True), code, control)


def _encoded(
    filt: AbstractFilter, observation: Point, control: Point | None, observed: Array | None
) -> tuple[Any, Any, Any]:
    """What a step needs of one observation and one input, and whether it was made."""
    observation, control = (
        jax.tree.map(lambda leaf: leaf[None], as_arrays(part, name))
        for part, name in ((observation, "observation"), (control, "control"))
    )
    as_known(observation, observed, control)
    codes, mask = filt.encode(observation, observed, "observation")
    return take((codes, filt.encode_controls(control, 1), mask), 0)


@eqx.filter_jit
def _start(
    filt: AbstractFilter, regularizer: Float[Array, ""], code: Any, control: Any
) -> tuple[Any, FilterOutput]:
    output = filt.start(code, regularizer)
    return filt.advance(output.weights, control), output


def run_filter(
    filt: AbstractFilter,
    observations: Points,
    *,
    controls: Any = None,
    observed: Any = None,
    prior: Embedding | None = None,
    state: Any = None,
    output_fn: Callable[[FilterOutput], Any] | None = None,
    checkpoint_every: int | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """Filter a sequence of observations by one scan of `filter_step`.

    **Arguments:**

    - `observations`: one sequence `[T, ...]`, or a list of sequences of any lengths. Then
      `controls` and `observed` are lists too. `vmap` is for sequences of one length.
    - `controls`: known inputs `[T, ...]`, the one at t acting from the state at t to the next.
    - `observed`: mask `[T]`, False where an observation is missing. Its value is ignored.
    - `prior`: embedding of the first hidden state, by default the training marginal. For the 2009
      filter it is of the state one step before.
    - `state`: of an earlier run (`run.state`), to go on from; then give no `prior` and no lists.
    - `output_fn`: what to keep of the `FilterOutput` of each step. For long sequences
      `lambda out: state_mean(filt, out)` keeps d numbers a step instead of n.
    - `checkpoint_every`: steps between two states that reverse mode stores (static). With it T
      steps store T / checkpoint_every + checkpoint_every states, least at the root of T, for one
      more forward pass.
    - `mesh`: devices to divide a list of sequences over; each gets the whole filter. See
      `devices.over_devices`.

    **Returns:** a `FilterOutput` with leading axis T, whose `state` alone is that after the last
    step; or what `output_fn` returned, stacked. A list of these for a list of sequences, which run
    side by side in one program. A lambda written in the call compiles each time. Cost: T steps.

    An observation far from all training observations, with each k(o_i, o) below 2^-52 k(o, o),
    counts as missing, with predictive value 0. So does one that the belief excludes, for example a
    label of probability 0.

    **Raises:** `ValueError` for observations or inputs of another kind than in training, a mask of
    another length, a `state` with a `prior`; outside `jit` also for inputs that are NaN,
    observations that are NaN and not marked, and values outside a kernel's domain.
    """
    if state is not None and prior is not None:
        raise ValueError("Give a `state` to go on from, or a `prior` to start from, not both.")
    many = isinstance(observations, list)
    observed, controls = as_known(observations, observed, controls, many)
    if many and state is not None:
        raise ValueError("Go on from the `state` of each run by a call of its own, without lists.")
    if mesh is not None and not many:
        raise ValueError("A `mesh` divides a list of sequences: give `observations` as a list.")
    state = filt.init(prior) if state is None else state
    every = None if checkpoint_every is None else as_count(checkpoint_every, "checkpoint_every")
    if not many:
        observations = as_points(observations, "observations")
        run = _scan(filt, state, observations, controls, observed, None, output_fn, every)
        check_values(filt.kernels(), observations, observed, controls)
        return run
    stacks, lengths = padded_sequences(observations, controls, observed)
    runs = over_devices(_scan_many, mesh, (filt, state, output_fn, every), stacks)
    check_values(filt.kernels(), observations, observed, controls)
    whole = output_fn is None
    steps = _with_state(runs, None) if whole else runs
    each = [jax.tree.map(lambda leaf, i=i, n=n: leaf[i, :n], steps) for i, n in enumerate(lengths)]
    if whole:
        each = [_with_state(one, take(runs.state, i)) for i, one in enumerate(each)]
    return each


def _with_state(output: FilterOutput, state: Any) -> FilterOutput:
    return eqx.tree_at(lambda o: o.state, output, state, is_leaf=lambda leaf: leaf is None)


@eqx.filter_jit
def _scan_many(shared, stacks):
    filt, state, output_fn, every = shared

    def one(observations, controls, observed, going):
        return _scan(filt, state, observations, controls, observed, going, output_fn, every)

    return jax.vmap(one)(*stacks)


@eqx.filter_jit
def _scan(
    filt: AbstractFilter,
    state: Any,
    observations: Points,
    controls: Points | None,
    observed: ArrayLike | None,
    going: Bool[Array, " T"] | None,
    output_fn: Callable[[FilterOutput], Any] | None,
    every: int | None,
):
    # All observations are encoded at once: one matrix product, not T products with a vector.
    codes, observed = filt.encode(observations, observed)
    count = observed.shape[0]
    inputs = (codes, filt.encode_controls(controls, count), observed), going

    def step(carry, inputs):
        inputs, going = inputs
        following, output = filt.update(carry, *inputs)
        if going is not None:  # padding leaves the state as it is
            following = jax.tree.map(lambda a, b: jnp.where(going, a, b), following, carry)
        return following, output if output_fn is None else output_fn(output)

    def scan(carry, inputs):
        return lax.scan(jax.checkpoint(step, prevent_cse=False), carry, inputs)

    if every is None or every >= count:
        state, outputs = scan(state, inputs)
    else:
        whole = count // every * every
        parts = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, every, *leaf.shape[1:]), inputs)
        state, first = lax.scan(jax.checkpoint(scan, prevent_cse=False), state, parts)
        outputs = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), first)
        if whole < count:
            state, rest = scan(state, take(inputs, slice(whole, None)))
            outputs = jax.tree.map(lambda *part: jnp.concatenate(part), outputs, rest)
    return _with_state(outputs, state) if output_fn is None else outputs


def belief(filt: AbstractFilter, output: Any) -> Any:
    """Embed the belief of a step, or those of a run as a batch `[T, n]`. Lists give lists.

    The points are the training states, their successors for the estimator `"prior"` and for a
    `ConditionalEmbeddingFilter`, and the centers of the cells or the landmarks for moments.
    """
    if isinstance(output, list):
        return [belief(filt, one) for one in output]
    return filt.embed(output.weights)


def state_mean(filt: AbstractFilter, output: Any) -> Any:
    """Return the mean state of a step, or of each step of a run `[T, ...]`. Lists give lists.

    A `ReadoutFilter` corrects it. For moments it is the mean of `MomentMaps.function`.
    """
    if isinstance(output, list):
        return [state_mean(filt, one) for one in output]
    mean = _mean(filt, output.weights)
    return mean if output.correction is None else mean + output.correction


_mean = eqx.filter_jit(lambda filt, weights: filt.mean(weights))


def predict(filt: AbstractFilter, output: Any, steps: int = 1, *, controls: Any = None) -> Any:
    """Predict the state `steps` transitions after a belief: that many steps without observations.

    **Arguments:** `output` of a step, of a run or batch with leading axes, or a list of runs;
    `steps` >= 1 (static); `controls` `[steps, ...]`, the first at the time of the belief and the
    same for all beliefs of a run, or a list of them for a list of runs.

    **Returns:** the `FilterOutput` of the last of these steps, a list for a list. `belief` and
    `state_mean` read it. Cost: `steps` moves of each belief. **Raises:** as `run_filter`.
    """
    if isinstance(output, list):
        inputs = [None] * len(output) if controls is None else controls
        check_lists(inputs, "controls", output, "output")
        pairs = zip(output, inputs, strict=True)
        return [predict(filt, run, steps, controls=own) for run, own in pairs]
    controls = as_known(None, None, controls)[1]
    ahead = _predict(filt, output, as_count(steps, "steps"), controls)
    check_values(filt.kernels(), None, None, controls)
    return ahead


@eqx.filter_jit
def _predict(filt: AbstractFilter, output: FilterOutput, steps: int, controls: Points | None):
    inputs = filt.encode_controls(controls, steps)

    def ahead(weights):
        for index in range(steps):
            control = take(inputs, index)
            state = filt.advance(weights, control)
            result = filt.update(state, None, control, jnp.asarray(False))[1]
            weights = result.weights
        return result

    for _ in range(output.predictive_value.ndim):
        ahead = jax.vmap(ahead)
    return ahead(output.weights)
