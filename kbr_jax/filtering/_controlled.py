"""A kernel Bayes filter of a driven system: the transition depends on known inputs."""

from typing import Any

import jax
import jax.numpy as jnp

from .._checks import (
    as_count,
    as_points,
    as_regularizer,
    check_alike,
    check_finite,
    in_precision,
    like,
    size,
    take,
    without_padding,
)
from .._numerics import AbstractFactor, matmul
from .._typing import Array, ArrayLike, Bool, Float, Point, Points
from ..embedding import Embedding
from ..features import (
    AbstractFeatures,
    FeatureChoice,
    LandmarkFeatures,
    RandomFourier,
    fit_features,
)
from ..kernels import TensorProduct, as_kernel
from ._base import AbstractSampleFilter, FilterStep
from ._kernel_bayes import KernelBayesFilter, KernelBayesState


class ControlledFilter(AbstractSampleFilter):
    r"""A kernel Bayes filter whose state is driven by known inputs: $P(s_{t+1} \mid s_t, u_t)$. Build it with `fit`.

    The transition is the conditional embedding of the successor given the pair of state and input, with the kernel
    $k_s(s, s') \, k_u(u, u')$ on pairs. From the belief $\sum_i \alpha_i \phi(s_i)$ and the input u,

    $$ v = (G_s \circ G_u + n \varepsilon' I)^{-1} \left[ (G_s \alpha) \circ k_u(U, u) \right] $$

    are weights on the training successors, in place of the first inverse of F11 eq 18; the rest of a step (the prior's weights
    $w = (G_s + n \varepsilon I)^{-1} \tilde G v$, their cleaning, Bayes' rule) is that of `base`, whose own transition is not used.
    With delta kernels and vanishing regularizers it is the exact forward filter of a controlled hidden Markov model.

    Give the inputs as `controls` to `filter`, `advance`, `smooth` and `predict`, one at a time as `control` to `step`. Cost of
    a step: that of `base`, and O(n r + r^2) with r landmarks of the pairs, O(n^2) exact.
    """

    states: AbstractFeatures
    observations: AbstractFeatures
    base: KernelBayesFilter
    pairs: AbstractFeatures
    pair_factor: AbstractFactor
    columns: Float[Array, "r n"]

    @property
    def support(self) -> Points:
        """The points `[n, ...]` that belief weights stand on."""
        return self.base.support

    @property
    def successors(self) -> Points:
        """The training states `[n, ...]` after those of `states`."""
        return self.base.successors

    @staticmethod
    def fit(
        base: KernelBayesFilter,
        kernel_controls: Any,
        controls: Points,
        *,
        regularizer: ArrayLike,
        landmarks: FeatureChoice = None,
    ) -> "ControlledFilter":
        r"""Learn the driven transition from the training data of a fitted filter and its inputs.

        **Arguments:**

        - `base`: a filter of form (b) or `"importance"`.
        - `kernel_controls`: kernel on inputs.
        - `controls`: inputs `[n, ...]`, one for each of the n training states of `base` that have a successor, the one at t
          acting from the state at t to the next; or one for each state of its training sequence, the last of which is not used.
        - `regularizer`: epsilon' > 0 of the transition, in `G_s * G_u + n epsilon' I`.
        - `landmarks`: of the pairs (state, input): None for the exact Gram matrix, a rank, or `Landmarks`.

        Cost O(n^3) exact, O(n r^2) with r landmarks.

        **Raises:** `ValueError` for a base of form (a), inputs of a wrong number or outside the kernel's domain, non-finite
        values, random Fourier features, or a regularizer that is not positive.
        """
        if base.form == "a":
            raise ValueError(
                "`base` must be of form 'b' or 'importance': form (a) keeps its belief on the successors."
            )
        if isinstance(landmarks, RandomFourier):
            raise ValueError(
                "The inputs need exact Gram matrices or landmarks, not random Fourier features."
            )
        kernel_controls = as_kernel(kernel_controls)
        controls, count = as_points(controls, "controls"), base.states.size
        if size(controls) not in (count, count + 1):
            raise ValueError(
                f"`controls` has {size(controls)} points; `base` was fitted to {count} transitions, and needs an input for each."
            )
        controls = check_finite(
            without_padding(take(controls, slice(count)), base.states.mask), "controls"
        )
        kernel_controls.check(controls, "controls")
        controls = in_precision(controls, base.states.dtype)
        kernel = TensorProduct((base.states.kernel, kernel_controls))
        pairs = fit_features(kernel, (base.states.points, controls), landmarks, base.states.mask)
        epsilon = as_regularizer(regularizer, "regularizer", base.states.dtype)
        anchors, active = _anchors(pairs)
        columns = kernel.kernels[0].gram(anchors[0], base.support)
        return ControlledFilter(
            states=base.states,
            observations=base.observations,
            base=base,
            pairs=pairs,
            pair_factor=pairs.ridge(epsilon),
            columns=columns if active is None else jnp.where(active[:, None], columns, 0),
        )

    def init(self, prior: Embedding | None = None) -> KernelBayesState:
        """As `base.init`."""
        return self.base.init(prior)

    def init_from_observation(
        self, observation: Point, control: Point | None = None
    ) -> tuple[KernelBayesState, FilterStep]:
        """As `base.init_from_observation`, with the input that acts after the first observation."""
        step = self.base.init_from_observation(observation)[1]
        controls = (
            None if control is None else jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], control)
        )
        code = self.with_controls(jnp.zeros((1, 0), self.states.dtype), controls)[0]
        return self.base._arrive(self._forward(step.weights, code)), step

    def update(
        self, state: KernelBayesState, code: Float[Array, " r"], observed: Bool[Array, ""]
    ) -> tuple[KernelBayesState, FilterStep]:
        """One step of `base` with the driven transition; the code ends with that of the input."""
        count = self.columns.shape[0]
        step = self.base.update(state, code[:-count], observed)[1]
        return self.base._arrive(self._forward(step.weights, code[-count:])), step

    def predict(
        self, weights: Float[Array, "*batch n"], steps: int = 1, controls: Points | None = None
    ) -> Embedding:
        """As `base.predict`, under the inputs `[steps, ...]`, the first of them at the time of the belief."""
        coordinates = self.with_controls(
            jnp.zeros((as_count(steps, "steps"), 0), self.states.dtype), controls
        )
        shifted = self._forward(weights, coordinates[0])
        for code in coordinates[1:]:
            shifted = self._forward(self.base._clean(self.base._on_pairs(shifted)), code)
        return Embedding(self.states.kernel, self.successors, shifted)

    def with_controls(
        self, coordinates: Float[Array, "m r"], controls: Points | None
    ) -> Float[Array, "m q"]:
        """Codes of m observations, each followed by the values of its input's kernel at the training pairs (landmarks)."""
        if controls is None:
            raise ValueError("This ControlledFilter needs `controls`, an input for each step.")
        controls, training = as_points(controls, "controls"), self.pairs.points[1]
        check_alike(controls, "controls", training, "training controls")
        controls = like(controls, training)
        if size(controls) != coordinates.shape[0]:
            raise ValueError(
                f"`controls` has {size(controls)} points; {coordinates.shape[0]} steps need an input each."
            )
        kernel = self.pairs.kernel.kernels[1]  # pyright: ignore[reportAttributeAccessIssue]
        kernel.check(controls, "controls")
        values = kernel.gram(controls, _anchors(self.pairs)[0][1])
        return jnp.concatenate([coordinates, values.astype(coordinates.dtype)], axis=1)

    def _forward(
        self, belief: Float[Array, "*batch n"], control: Float[Array, "*time r"]
    ) -> Float[Array, "*batch n"]:
        """The learned transition: weights on the successors, by regression on the pairs."""
        values = matmul(belief, self.columns.T) * control
        coordinates = (
            self.pairs.of_values(values) if isinstance(self.pairs, LandmarkFeatures) else values
        )
        return self.pairs.ridge_weights(
            self.pair_factor, coordinates.reshape(-1, coordinates.shape[-1])
        ).reshape(belief.shape)

    def _backward(
        self, values: Float[Array, "b n"], control: Float[Array, " r"]
    ) -> Float[Array, "b n"]:
        """Its adjoint: mean of a function, known at the successors, of the state after each training state and the input."""
        coordinates = self.pair_factor.solve(self.pairs.from_sample(values).T).T
        coordinates = (
            self.pairs.on_landmarks(coordinates)
            if isinstance(self.pairs, LandmarkFeatures)
            else coordinates
        )
        return matmul(coordinates * control, self.columns)


def _anchors(pairs: AbstractFeatures) -> tuple[Points, Bool[Array, " r"] | None]:
    """The pairs that coordinates stand on, and which of them count."""
    if isinstance(pairs, LandmarkFeatures):
        return pairs.landmarks.points, pairs.landmarks.active
    return pairs.points, pairs.mask
