"""A kernel Bayes filter whose belief is challenged at every observation, and replaced when a rival explains them better."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_fraction, as_positive
from .._typing import Array, ArrayLike, Bool, Float, Point, Points
from ..embedding import Embedding
from ..features import AbstractFeatures
from ..kernels import as_kernel
from ..rules import clean_weights
from ._base import AbstractSampleFilter, FilterStep
from ._contrast import Contrast
from ._kernel_bayes import KernelBayesFilter, KernelBayesState


class RivalState(eqx.Module):
    """Prior of the next observation, and the evidence against the belief that has gathered so far."""

    prior: KernelBayesState
    doubt: Float[Array, ""]


class RivalFilter(AbstractSampleFilter):
    r"""A kernel Bayes filter that finds back from a wrong belief where observations rarely tell. Build it with `fit`.

    Where two states look alike, a filter that follows the wrong one is not contradicted by its kernel on observations, and
    mixing in what a single observation says (`Recovery`) ruins the tracking. Here every observation o also proposes a rival:

    - Its own embedding $v = (K + n \varepsilon' I)^{-1} k(O, o)$, without the training states at which the state kernel of
      the contrast is above `overlap` of its value at the estimate $\hat s$, and cleaned, is a prior. Bayes' rule with o gives
      the rival's belief, decoded as $\hat r$.
    - Doubt adds up: $S \leftarrow \max(0, S + \ell(\hat r; y) - \ell(\hat s; y) - \text{drift})$, with the evidence of
      `Contrast` for the features y of o: Page's test of a change, here from "the belief is right" to "the rival is". A
      missing observation, or one without a rival, leaves S as it is.
    - When S exceeds `threshold` the rival's belief replaces the filter's, S is 0 again, and `FilterStep.restarted` is true;
      `predicted` is then the rival's prior, `evidence` still that of the prediction that failed.

    As long as nothing is replaced the beliefs are those of `base`, exactly. Cost of a step: about twice that of `base`,
    plus O(n^2).
    """

    states: AbstractFeatures
    observations: AbstractFeatures
    base: KernelBayesFilter
    contrast: Contrast
    features: Callable[[Point], Array]
    decode: Callable[[Embedding], Point] = eqx.field(static=True)
    overlap: Float[Array, ""]
    drift: Float[Array, ""]
    threshold: Float[Array, ""]

    @property
    def support(self) -> Points:
        """The points `[n, ...]` that belief weights stand on."""
        return self.base.support

    @staticmethod
    def fit(
        base: KernelBayesFilter,
        features: Callable[[Point], Array],
        decode: Callable[[Embedding], Point],
        *,
        kernel: Any,
        regularizer: ArrayLike,
        degrees: ArrayLike = 3.0,
        directions: int = 1,
        block: int = 40,
        overlap: ArrayLike = 0.05,
        drift: ArrayLike = 3.0,
        threshold: ArrayLike = 8.0,
    ) -> "RivalFilter":
        r"""Learn from the training data of a fitted filter which features of an observation expose a wrong belief.

        **Arguments:**

        - `base`: a filter of form (b) or `"importance"`; its `observation_regularizer` is that of the rivals' embedding.
        - `features`: function of one observation to `[p]` numbers, in which the true state and its look-alikes differ
          somewhere: a color histogram, a bag of words. An `equinox.Module` if it has parameters.
        - `decode`: function of a belief (one `Embedding`) to a point estimate, such as `kbr_jax.mean` or
          `kbr_jax.decode_rotation`.
        - `kernel`, `regularizer`, `degrees`, `directions`, `block`: of the regression from states to features, see
          `Contrast.fit`. The training pairs must be in order of time.
        - `overlap`: in [0, 1); what counts as near the estimate, as a share of `kernel` at zero distance.
        - `drift` > 0: what an observation must say in favor of the rival, in nats, to count at all.
        - `threshold` > 0: nats, beyond the drifts, at which the belief is replaced. Take drift and threshold from held-out
          runs with right and wrong starts: above what S reaches in the first, below what it must reach in the second.

        Cost: that of n steps of Bayes' rule, and O(n^3).

        **Raises:** `ValueError` for a base of form (a), features that are no vector, and as `Contrast.fit`.
        """
        if base.form == "a":
            raise ValueError(
                "`base` must be of form 'b' or 'importance': form (a) has no prior that a rival could give."
            )
        if base.states.mask is not None:
            raise ValueError(
                "`base` was fitted to padded data; fit it without a `mask`, in order of time."
            )
        kernel = as_kernel(kernel)
        overlap = as_fraction(overlap, "overlap")
        function: Any = (
            features if isinstance(features, eqx.Module) else jax.tree_util.Partial(features)
        )
        values = jax.vmap(function)(base.observations.points)
        columns = kernel.gram(base.states.points, base.states.points)
        near = columns > overlap.astype(columns.dtype) * jnp.diagonal(columns)[:, None]

        def rival(inputs):
            return decode(base.belief(_challenge(base, *inputs)[0]))

        return RivalFilter(
            states=base.states,
            observations=base.observations,
            base=base,
            contrast=Contrast.fit(
                kernel,
                base.states.points,
                values,
                lax.map(rival, (base.observations.matrix, near)),
                regularizer=regularizer,
                degrees=degrees,
                directions=directions,
                block=block,
            ),
            features=function,
            decode=decode,
            overlap=overlap,
            drift=as_positive(drift, "drift", scalar=True),
            threshold=as_positive(threshold, "threshold", scalar=True),
        )

    def init(self, prior: Embedding | None = None) -> RivalState:
        """As `base.init`, without doubt."""
        return self._without_doubt(self.base.init(prior))

    def init_from_observation(self, observation: Point) -> tuple[RivalState, FilterStep]:
        """As `base.init_from_observation`, without doubt."""
        state, step = self.base.init_from_observation(observation)
        return self._without_doubt(state), step

    def update(
        self, state: RivalState, code: Float[Array, " r"], observed: Bool[Array, ""]
    ) -> tuple[RivalState, FilterStep]:
        """One step of `base`, one of the rival, and the choice between them; the code ends with the projected features."""
        count = self.contrast.ratios.shape[0]
        code, projected = code[:-count], code[-count:]
        following, step = self.base.update(state.prior, code, observed)
        estimate = self.decode(self.base.belief(step.weights))
        rival, prior, exists = _challenge(self.base, code, self._near(estimate))
        gain = self.contrast.evidence(self.decode(self.base.belief(rival)), projected)
        gain = gain - self.contrast.evidence(estimate, projected) - self.drift.astype(gain.dtype)
        doubt = jnp.where(
            observed & exists,
            jnp.maximum(state.doubt + gain.astype(state.doubt.dtype), 0),
            state.doubt,
        )
        swapped = observed & exists & (doubt > self.threshold.astype(doubt.dtype))

        weights = jnp.where(swapped, rival, step.weights)
        following = jax.tree.map(
            lambda new, old: jnp.where(swapped, new, old), self.base._advance(rival), following
        )
        predicted = jnp.where(swapped, prior, step.predicted)
        step = FilterStep(weights, predicted, step.evidence, step.restarted | swapped)
        return RivalState(following, jnp.where(swapped, 0, doubt)), step

    def predict(self, weights: Float[Array, "*batch n"], steps: int = 1) -> Embedding:
        """As `base.predict`."""
        return self.base.predict(weights, steps)

    def coordinates(self, observations: Points) -> Float[Array, "m r"]:
        """Codes of `base`, each followed by the features that the contrast looks at."""
        projected = self.contrast.project(jax.vmap(self.features)(observations))
        coordinates = self.base.coordinates(observations)
        return jnp.concatenate([coordinates, projected.astype(coordinates.dtype)], axis=1)

    def _without_doubt(self, state: KernelBayesState) -> RivalState:
        return RivalState(state, jnp.zeros((), self.base.successor_codes.dtype))

    def _near(self, estimate: Point) -> Bool[Array, " n"]:
        point = jax.tree.map(lambda leaf: leaf[None], estimate)
        column = self.contrast.kernel.gram(point, self.contrast.states)[0]
        return column > self.overlap.astype(column.dtype) * self.contrast.kernel.diagonal(point)[0]


def _challenge(
    base: KernelBayesFilter, code: Float[Array, " r"], near: Bool[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"], Bool[Array, ""]]:
    """The rival's belief and prior from one observation, away from where the estimate is; and whether there is any."""
    own = base.observations.ridge_weights(base.observation_factor, code[None])[0]
    own = jnp.where(near, 0, jnp.maximum(own, 0))
    prior = clean_weights(own, clip=True, truncation=base.truncation, normalize=True)
    return base._posterior(prior, prior, code), prior, jnp.sum(own) > 0
