"""Smoothing: what later observations say about earlier states, by Bayes' rule with the transition as likelihood."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_count, as_regularizer
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float, Points
from ..embedding import normalized
from ..rules import clean_weights
from ._controlled import ControlledFilter
from ._kernel_bayes import KernelBayesFilter


def smooth(
    filt: KernelBayesFilter | ControlledFilter,
    weights: Float[Array, "T n"],
    *,
    controls: Points | None = None,
    regularizer: ArrayLike,
    lag: int | None = None,
    form: Literal["b", "importance"] | None = None,
    clip: bool = True,
    normalize: bool = True,
) -> Float[Array, "T n"]:
    r"""Beliefs about each state given the observations after it too: the kernel Bayes smoother, backwards over a filtered run.

    Let $\alpha$ be the filtered belief at t, and $a$ the smoothed belief at t + 1 with $\hat m = \sum_j a_j \phi(s_j)$. The chain
    rule of form (a) with the learned transition $P = (G + n \varepsilon' I)^{-1} \tilde G$ ($\tilde G$ the Gram matrix of training
    states and support) joins $s_t$ and $s_{t+1}$; Bayes' rule, with the belief as prior and the transition as likelihood, gives
    $s_t$ given $s_{t+1}$; the sum rule averages it over $\hat m$. Together, one solve a step:

    $$ \beta = \alpha \circ P^\top g, \qquad g = K_+ \left( (D K_+)^2 + \delta I \right)^{-1} D k_a, \qquad
       D = \operatorname{diag}(P \alpha), $$

    $K_+$ the Gram matrix of the training successors, $k_a = \sum_j a_j k(S_+, s_j)$. The function g estimates, at the successors,
    the ratio of what is known of $s_{t+1}$ from all observations to what was predicted from those up to t; $P^\top g$ is its
    mean over the state that follows each point. For `form="importance"` $g = (K_+ D + \delta I)^{-1} k_a$. With delta kernels and
    vanishing regularizers it is the exact forward-backward algorithm of a hidden Markov model, if the filter is.

    **Arguments:**

    - `filt`: a fitted filter, of any form; its learned transition is used even where it predicts by `"shift"`. Smooth a run of
      a `RivalFilter` with its `base`.
    - `weights`: filtered beliefs `[T, n]`, `kbr_jax.filter(filt, observations).weights`, from the first observation on. `vmap`
      over a leading batch axis for many sequences. Where observations were missing the beliefs are predictions, as they should
      be.
    - `controls`: of a `ControlledFilter`, the inputs `[T, ...]` of the run (the last acts on no state here).
    - `regularizer`: delta > 0, on the squared operator for form (b), the ridge itself for `"importance"`. It bounds the ratio g,
      and wants to be larger than the filter's: .1 to 1 for `"importance"` and .03 to .3 for (b), where weights sum to 1 and
      k(s, s) = 1. Take it from held-out data.
    - `lag`: None for the belief given the whole sequence. For L >= 1 (static) the belief given the observations up to t + L, or
      to the end where it is nearer.
    - `form`: of Bayes' rule; as the filter's if None, with (b) for a filter of form (a). `"importance"` clips D, and costs one
      real solve.
    - `clip`: of g at 0, as a ratio of densities should be; the beliefs keep their signs, which filtered ones need (clipped,
      their means are worse than before smoothing).
    - `normalize`: the smoothed weights, at every step; else their sum drifts from step to step, as delta takes from g.

    D is cleaned as `filt` cleans a prior's weights.

    **Returns:** weights `[T, n]` on `filt.support`; `filt.belief(weights)` embeds them. The last belief is the filter's. Cost
    O(T (n r^2 + r^3)) with r landmarks of the states, O(T n^3) exact, whatever the lag is, and O(T L n r). The gradient recomputes
    each step, and stores T beliefs, (L + 1) T for a lag.

    **Raises:** `ValueError` for weights that are no sequence of beliefs of `filt`, inputs that do not fit, an unknown form, or a
    `lag` below 1.
    """
    if not isinstance(filt, (KernelBayesFilter, ControlledFilter)):
        raise ValueError(
            "`smooth` needs a `KernelBayesFilter` or a `ControlledFilter`, "
            f"got {type(filt).__name__}; for a `RivalFilter` pass its `base`."
        )
    base = filt.base if isinstance(filt, ControlledFilter) else filt
    weights = jnp.asarray(weights).astype(filt.states.dtype)
    if weights.ndim != 2 or weights.shape[0] == 0 or weights.shape[1] != filt.states.size:
        raise ValueError(
            f"`weights` has shape {weights.shape}; beliefs of this filter are [T, {filt.states.size}]. Use `vmap` for several."
        )
    form = form or ("importance" if base.form == "importance" else "b")
    if form not in ("b", "importance"):
        raise ValueError(f"`form` must be 'b' or 'importance', got {form!r}.")
    lag = None if lag is None else as_count(lag, "lag")
    if lag is not None and lag >= weights.shape[0] - 1:
        lag = None
    delta = as_regularizer(regularizer, "regularizer", filt.states.dtype)
    inputs = filt.with_controls(jnp.zeros((weights.shape[0], 0), weights.dtype), controls)
    return _smooth(
        filt, weights, None if base is filt else inputs, delta, lag, form, clip, normalize
    )


@eqx.filter_jit
def _smooth(
    filt: KernelBayesFilter | ControlledFilter,
    weights: Float[Array, "T n"],
    controls: Any,
    delta: Float[Array, ""],
    lag: int | None,
    form: str,
    clip: bool,
    normalize: bool,
) -> Float[Array, "T n"]:
    base = filt.base if isinstance(filt, ControlledFilter) else filt
    successors = base.states.at(base.successors)
    coordinates = successors.coordinates(filt.support)
    ratios = (
        successors.importance_values
        if form == "importance"
        else lambda *args: successors.posterior(*args)[1]
    )
    controls = None if controls is None else controls[:-1]
    # The joint's weights at all times at once, as one matrix product.
    joints = clean_weights(
        filt._forward(weights[:-1], controls),
        clip=base.clip or form == "importance",
        truncation=base.truncation,
        normalize=base.normalize,
        mask=base.states.mask,
    )

    def scaled(beliefs):
        return normalized(beliefs) if normalize else beliefs

    def step(later, inputs):
        """From beliefs at t + 1 given the observations to t + 1 + j, in row j, those at t given the ones to t + j."""
        belief, joint, control = inputs
        rows = later if lag is None else later[:-1]
        ratio = ratios(joint, matmul(rows, coordinates), delta)
        smoothed = scaled(
            belief * filt._backward(jnp.maximum(ratio, 0) if clip else ratio, control)
        )
        if lag is not None:
            smoothed = jnp.concatenate([scaled(belief)[None], smoothed])
        return smoothed, smoothed[-1]

    last = scaled(weights[-1])
    start = jnp.tile(last, (1 if lag is None else lag + 1, 1))
    inputs = weights[:-1], joints, controls
    earlier = lax.scan(jax.checkpoint(step, prevent_cse=False), start, inputs, reverse=True)[1]
    return jnp.concatenate([earlier, last[None]])
