"""Smoothing: Bayes' rule with the transition as likelihood tells what later observations say."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_count, as_regularizer
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float
from ..embedding import Embedding, normalized
from ..rules import Clipping, check_estimator
from ._base import AbstractFilter, FilterOutput
from ._sequences import as_known, check_lists
from ._smoothers import AbstractSmoother


def smooth(
    filt: AbstractFilter,
    run: FilterOutput | list,
    *,
    regularizer: ArrayLike,
    controls: Any = None,
    lag: int | None = None,
    estimator: Literal["pairs", "importance"] = "pairs",
    clipping: Clipping | None = None,
    positive: bool = True,
    normalize: bool = True,
) -> Any:
    r"""Embed each state given the later observations too, backwards over a filtered run.

    Let $\alpha$ be the filtered belief at t, and a the smoothed belief at t + 1 on points s_j. The
    chain rule on the prior's points with the transition $P = (G + n \varepsilon' I)^{-1} \tilde G$
    joins $s_t$ and $s_{t+1}$. Bayes' rule gives $s_t$ given $s_{t+1}$, and the sum rule averages it
    over a. Together they are one solve:

    $$ \beta = \alpha \circ P^\top g, \qquad g = K_+ \left( (D K_+)^2 + \delta I \right)^{-1} D k_a,
       \qquad D = \operatorname{diag}(P \alpha), $$

    with $K_+$ the Gram matrix of the training successors and $k_a = \sum_j a_j k(S_+, s_j)$. The
    function g estimates the density ratio of the smoothed to the predicted next state. For
    `"importance"` $g = (K_+ D + \delta I)^{-1} k_a$. With delta kernels and vanishing regularizers
    it is the exact forward-backward algorithm of a hidden Markov model, if the filter is.

    **Arguments:**

    - `filt`: any filter with a learned transition (a filter that shifts uses the model it was
      given), or a known one. `run`: of `run_filter(filt, observations)`, from the start. A list of
      runs gives a list (and `controls` are one too). Use `vmap` for sequences of one length.
    - `regularizer`: delta > 0, on the squared operator, or the ridge for `"importance"`. It bounds
      the ratio g and wants to be larger than the filter's: .03 to .3 for `"pairs"` and .1 to 1 for
      `"importance"`, where weights sum to 1 and k(s, s) = 1. Choose it on held-out data.
    - `controls`: the inputs `[T, ...]` of the run.
    - `lag`: None for the whole sequence. For L >= 1 (static), the belief at t uses the observations
      up to t + L.
    - `clipping`: of D; by default `Clipping()`.
    - `positive`: clip g at 0, as a ratio of densities should be. Moments do not know g at single
      points: there the mean of g given each state is clipped.
    - `normalize`: divide the smoothed weights by their sum at every step. Not for the 2009 filter
      of the estimator `"song2009"`, whose weights sum to 0.

    **Returns:** an `Embedding` with weights `[T, m]` on the points of `belief(filt, run)`. The last
    belief is the filter's. Cost O(T (n r^2 + r^3)) with landmarks, O(T n^3) exact, whatever the lag
    is, and O(T L n r). The gradient recomputes each step.

    Where no transition reaches the later belief (a restart, a move further than the kernel's
    bandwidth), the smoother starts again from the filter's belief.

    **Raises:** `ValueError` for a run that is not a sequence, a filter whose transition cannot go
    backwards, weights that sum to 0 where they are to be normalized, and as `run_filter` for
    `controls`.
    """
    if isinstance(run, list):
        own: Any = {"lag": lag, "estimator": estimator, "clipping": clipping}
        own |= {"regularizer": regularizer, "positive": positive, "normalize": normalize}
        inputs = [None] * len(run) if controls is None else controls
        check_lists(inputs, "controls", run, "run")
        return [smooth(filt, r, controls=u, **own) for r, u in zip(run, inputs, strict=True)]
    clipping = Clipping() if clipping is None else clipping
    check_estimator(estimator, clipping, "pairs", "importance")
    if normalize and getattr(filt, "estimator", None) == "song2009":
        raise ValueError(
            "`normalize=True` divides by the sum of weights, which is 0 for the estimator "
            "'song2009': fit the filter with 'affine', or give `normalize=False`."
        )
    beliefs = filt.embed(run.weights)
    if beliefs.weights.ndim != 2:
        raise ValueError(
            f"`run` has weights of shape {beliefs.weights.shape}; a run of one sequence has [T, "
            f"m]. "
            "Use `jax.vmap` for several."
        )
    count = beliefs.weights.shape[0]
    lag = None if lag is None else as_count(lag, "lag")
    lag = None if lag is not None and lag >= count - 1 else lag
    delta = as_regularizer(regularizer, "regularizer", beliefs.weights.dtype)
    controls = as_known(None, None, controls)[1]
    inputs = filt.encode_controls(controls, count)
    smoother = filt.smoother(beliefs.points)
    importance = estimator == "importance"
    weights = _smooth(
        smoother, beliefs, inputs, delta, lag, importance, clipping, positive, normalize
    )
    return Embedding(beliefs.kernel, beliefs.points, weights)


@eqx.filter_jit
def _smooth(
    smoother: AbstractSmoother,
    beliefs: Embedding,
    controls: Any,
    delta: Float[Array, ""],
    lag: int | None,
    importance: bool,
    clipping: Clipping,
    positive: bool,
    normalize: bool,
) -> Float[Array, "T m"]:
    model, weights = smoother.model, beliefs.weights
    # Coordinates of the points as next states.
    codes = model.features_y.coordinates(beliefs.points)
    controls = jax.tree.map(lambda leaf: leaf[:-1], controls)
    # The joint's weights at all times at once, as one matrix product.
    predicted = model.weights(smoother.forward(weights[:-1], controls))
    joints = model.clip_and_normalize(predicted, clipping)

    def product(belief, mean):
        """The belief itself where no transition reaches what came later."""
        both = belief * mean
        lost = jnp.all(both == 0, axis=-1, keepdims=True)
        return jnp.where(lost, belief, both)

    def scaled(beliefs):
        return normalized(beliefs) if normalize else beliefs

    def step(later, inputs):
        """Beliefs at t from those at t + 1. Row j has seen t + 1 + j."""
        belief, joint, control = inputs
        rows = later if lag is None else later[:-1]
        ratio = model.ratio(joint, matmul(rows, codes), delta, importance)
        mean = model.regress(ratio, lambda code: smoother.adjoint(code, control), positive)
        smoothed = scaled(product(belief, mean))
        if lag is not None:
            smoothed = jnp.concatenate([scaled(belief)[None], smoothed])
        return smoothed, smoothed[-1]

    last = scaled(weights[-1])
    start = jnp.tile(last, (1 if lag is None else lag + 1, 1))
    inputs = weights[:-1], joints, controls
    earlier = lax.scan(jax.checkpoint(step, prevent_cse=False), start, inputs, reverse=True)[1]
    return jnp.concatenate([earlier, last[None]])
