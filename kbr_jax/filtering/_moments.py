"""The kernel Bayes filter on moments of its training sample: a step that does not see the training size."""

from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_count, as_fraction, as_regularizer, check_alike, like
from .._numerics import PSDFactor, matmul, psd_factor, safe_divide
from .._typing import Array, ArrayLike, Bool, Float, PointFunction, Points
from ..embedding import Embedding, check_unbatched, guarded_sum
from ..features import (
    AbstractFeatures,
    Landmarks,
    PartitionOfUnity,
    RandomFourier,
    greedy_landmarks,
)
from ..kernels import as_kernel
from ..rules import (
    MomentModel,
    Moments,
    check_signs,
    check_truncation,
    collect_moments,
    contract,
    fit_moments,
    kept,
    moment_maps,
    on_landmarks,
    posterior,
    ravel_point,
)
from ._base import AbstractFilter, as_transitions, most_active


class MomentStep(eqx.Module):
    r"""What a step, or with leading axes many steps, knows of the hidden state.

    The belief's weight on any training triple is $\beta(s, o) = (b(s)^\top c) (\tilde\psi(o)^\top u)$: `prior` is c `[..., K]`
    (cleaned), `likelihood` is u `[..., q + 1]`. Read it by the filter's `expectation`, `belief` or `weights`.

    `evidence`: as in `FilterStep`; NaN where the observation is missing.
    """

    prior: Float[Array, "*time K"]
    likelihood: Float[Array, "*time q1"]
    evidence: Float[Array, "*time"]


class MomentFilter(AbstractFilter):
    r"""The kernel Bayes filter of `KernelBayesFilter`, form (b) or importance-weighted, on `Moments`. Build it with
    `MomentFilter.fit` from arrays, or `MomentFilter.from_moments` from a stream.

    With plain moments it *is* the landmark form of `KernelBayesFilter` without clipping. With soft cells the prior's
    weights are interpolated between the K centers, $w_i = \sum_k a_k(s_i) \rho_k$ with $\rho_k$ the weight at center k, and
    $\rho$ is clipped, truncated and normalized in place of w. What is approximated is the prior only, at the resolution
    of the cells; the update and the transition act on every training triple. With all training states as centers and a
    vanishing temperature nothing is approximated.

    Cost of a step: O(K q^2 + q^3 + K q p + p^2), independent of the training size n; with `max_active` k cells instead of K.
    A batch by `vmap` runs as matrix products of the batch with the moments.
    """

    model: MomentModel
    transition_factor: PSDFactor
    posterior_regularizer: Float[Array, ""]
    truncation: Float[Array, ""]
    form: Literal["b", "importance"] = eqx.field(static=True)
    transition: Literal["shift", "two-inverse"] = eqx.field(static=True)
    clip: bool = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    max_active: int | None = eqx.field(static=True)

    @property
    def moments(self) -> Moments:
        """The sums over the training sample; `merge_moments` with those of new data, then `from_moments`."""
        return self.model.moments

    @property
    def observations(self) -> AbstractFeatures:
        """Feature map of the observations."""
        return self.moments.maps.y

    @staticmethod
    def fit(
        kernel_states: Any,
        kernel_observations: Any,
        states: Points,
        observations: Points,
        *,
        successors: Points | None = None,
        regularizer: ArrayLike,
        posterior_regularizer: ArrayLike,
        landmarks_states: Landmarks | RandomFourier | int,
        landmarks_observations: Landmarks | RandomFourier | int,
        cells: PartitionOfUnity | None = None,
        function: PointFunction = ravel_point,
        transition: Literal["shift", "two-inverse"] = "shift",
        mask: ArrayLike | None = None,
        **options: Any,
    ) -> "MomentFilter":
        """Learn a filter from arrays: `collect_moments`, then `from_moments`.

        **Arguments:** samples, `mask`, kernels and regularizers as in `KernelBayesFilter.fit`; landmarks are a rank (greedy),
        `Landmarks` or `RandomFourier`; `cells` and `function` as in `moment_maps`; `options` as in `from_moments`.

        **Raises:** `ValueError` as `KernelBayesFilter.fit`, and for clipping without cells.
        """
        kernel_states, kernel_observations = (
            as_kernel(kernel_states),
            as_kernel(kernel_observations),
        )
        states, observations, successors, mask = as_transitions(
            states, observations, successors, 0, mask
        )
        kernel_states.check(states, "states")
        kernel_observations.check(observations, "observations")
        maps = moment_maps(
            kernel_states,
            kernel_observations,
            _landmarks(kernel_states, states, landmarks_states),
            _landmarks(kernel_observations, observations, landmarks_observations),
            cells=cells,
            function=function,
            embedding=cells is None or transition == "two-inverse",
            shift=transition == "shift",
        )
        moments = collect_moments(maps, states, observations, successors, mask=mask)
        return MomentFilter.from_moments(
            moments,
            regularizer=regularizer,
            posterior_regularizer=posterior_regularizer,
            transition=transition,
            **options,
        )

    @staticmethod
    def from_moments(
        moments: Moments,
        *,
        regularizer: ArrayLike,
        posterior_regularizer: ArrayLike,
        transition_regularizer: ArrayLike | None = None,
        form: Literal["b", "importance"] = "b",
        transition: Literal["shift", "two-inverse"] = "shift",
        clip: bool | None = None,
        truncation: ArrayLike | None = None,
        normalize: bool = True,
        max_active: int | None = None,
    ) -> "MomentFilter":
        """A filter from moments of triples (state, observation, successor); cost O(p^3).

        **Arguments:**

        - `moments`, collected with `successors` and maps that keep what the transition needs: `shift=True` for `"shift"`,
          `embedding=True` for `"two-inverse"`.
        - `regularizer`, `posterior_regularizer`, `transition_regularizer`, `form` (not "a"), `transition`, `normalize`: as in
          `KernelBayesFilter.fit`.
        - `clip`, `truncation`: by default on, at .02, with soft cells, and off without, where they are impossible. A
          filter that cannot clip wants a larger `posterior_regularizer`.
        - `max_active`: update with k cells only (static), those that are largest times the likelihood of the observation: exact
          as long as truncation leaves no more. Saves memory traffic for one sequence; for a batch the products with all cells
          are faster.
        """
        maps = moments.maps
        clip = (maps.cells is not None) if clip is None else clip
        truncation = as_fraction(
            0.02 if clip and truncation is None else (0.0 if truncation is None else truncation),
            "truncation",
        )
        if form not in ("b", "importance"):
            raise ValueError(
                f"`form` must be 'b' or 'importance', got {form!r}; form (a) needs the sample: `KernelBayesFilter`."
            )
        if transition not in ("shift", "two-inverse"):
            raise ValueError(f"`transition` must be 'shift' or 'two-inverse', got {transition!r}.")
        if transition == "shift":
            kept(moments.transition, "transition")
        else:
            kept(moments.embedding, "embedding")
        kept(moments.cross, "cross")
        check_signs(maps, clip, form)
        check_truncation(clip or form == "importance", truncation)
        model = fit_moments(moments, regularizer=regularizer)
        dtype = moments.covariance.dtype
        transition_factor = model.factor
        if transition_regularizer is not None:
            ridge = as_regularizer(transition_regularizer, "transition_regularizer", dtype)
            transition_factor = psd_factor(moments.covariance, moments.count * ridge)
        return MomentFilter(  # pyright: ignore[reportCallIssue] (`observations` is a property, not a field)
            model=model,
            transition_factor=transition_factor,
            posterior_regularizer=as_regularizer(
                posterior_regularizer, "posterior_regularizer", dtype
            ),
            truncation=truncation.astype(dtype),
            form=form,
            transition=transition,
            clip=clip or form == "importance",
            normalize=normalize,
            max_active=None if max_active is None else as_count(max_active, "max_active"),
        )

    def init(self, prior: Embedding | None = None) -> Float[Array, " K"]:
        """Coefficients of the prior of the first observation; by default of the training states' marginal."""
        maps, moments = self.moments.maps, self.moments
        if prior is not None:
            check_unbatched(prior, "prior")
            check_alike(prior.points, "prior.points", maps.x.points, "training states")
            coordinates = maps.x.coordinates(like(prior.points, maps.x.points)).astype(
                moments.total.dtype
            )
            return self.model.coefficients(
                matmul(prior.weights.astype(coordinates.dtype), coordinates)
            )
        if maps.cells is not None:
            return jnp.broadcast_to(moments.uniform, moments.mass.shape)
        return self.model.coefficients(moments.total * moments.uniform)

    def coordinates(self, observations: Points) -> Float[Array, "m q"]:
        """Codes of m observations, in the precision of the moments."""
        return self.observations.coordinates(observations).astype(self.moments.total.dtype)

    def update(
        self, state: Float[Array, " K"], code: Float[Array, " q"], observed: Bool[Array, ""]
    ) -> tuple[Float[Array, " K"], MomentStep]:
        """One step for an encoded observation: clean the prior, apply Bayes' rule, predict."""
        prior, moments = self._clean(state), self.moments
        foreseen = matmul(moments.readout[:, :-1, -1], code)
        evidence = safe_divide(matmul(prior, foreseen), matmul(prior, moments.mass))
        active, index = prior, slice(None)
        if self.max_active is not None and self.max_active < prior.shape[0]:
            index = most_active(prior, foreseen, self.max_active)
            active = prior[index]
        operator = moments.operator(active, index)
        update = posterior(
            operator, code[None], self.posterior_regularizer, self.form == "importance"
        )[0]
        # The constant behind psi: all weight on it where nothing was observed (or only what underflows), else none.
        heard = observed & jnp.any(update != 0)
        likelihood = jnp.append(jnp.where(heard, update, 0), (~heard).astype(update.dtype))
        step = MomentStep(prior, likelihood, jnp.where(observed, evidence, jnp.nan))
        return self._advance(active, likelihood, index), step

    def belief(self, step: MomentStep) -> Embedding:
        r"""The belief as an embedding over states.

        Plain moments: on the p landmarks of the states, with the values that $\sum_i \beta_i \phi(s_i)$ has in their span. Soft
        cells: on the K centers, each with the weight of its cell. Cost O(K q p), or O(K q). For the mean of a known function,
        `expectation` is exact and these are not.
        """
        maps, moments = self.moments.maps, self.moments
        if maps.cells is not None:
            return Embedding(maps.x.kernel, maps.cells.centers.points, self._contributions(step))
        coordinates = contract(kept(moments.embedding, "embedding"), step.prior, step.likelihood)
        return Embedding(maps.x.kernel, maps.x.points, on_landmarks(maps.x, coordinates))

    def expectation(self, step: MomentStep) -> Float[Array, "*time e"]:
        r"""Mean of the maps' `function` under the belief, $\sum_i \beta_i f(s_i) / \sum_i \beta_i$ over the whole training sample.

        The divisor is kept away from 0 as in `normalize`. Cost O(K q e).
        """
        values = contract(self.moments.readout[..., :-1], step.prior, step.likelihood)
        return values / guarded_sum(self._contributions(step))[..., None]

    def weights(
        self, step: MomentStep, states: Points, observations: Points
    ) -> Float[Array, "*time m"]:
        """The belief's weights on m training triples with the given states and observations, `[..., m]`."""
        maps = self.moments.maps
        basis = maps.basis(maps.x.coordinates(states), states)
        psi = maps.y.coordinates(observations)
        psi = jnp.concatenate([psi, jnp.ones_like(psi[:, :1])], axis=1)
        return matmul(step.prior, basis.T) * matmul(step.likelihood, psi.T)

    def predict(self, step: MomentStep, steps: int = 1) -> MomentStep:
        """What the filter would believe `steps` transitions (static) later if it observed nothing; a batch of steps too."""
        for _ in range(as_count(steps, "steps")):
            prior = self._clean(self._advance(step.prior, step.likelihood, slice(None)))
            likelihood = jnp.zeros_like(step.likelihood).at[..., -1].set(1)
            step = MomentStep(prior, likelihood, jnp.full_like(step.evidence, jnp.nan))
        return step

    def _clean(self, coefficients: Float[Array, "*time K"]) -> Float[Array, "*time K"]:
        return self.model.clean(
            coefficients, clip=self.clip, truncation=self.truncation, normalize=self.normalize
        )

    def _contributions(self, step: MomentStep) -> Float[Array, "*time K"]:
        """Sum of the belief's weights over each basis function."""
        return step.prior * matmul(step.likelihood, self.moments.readout[..., -1].T)

    def _advance(
        self, prior: Float[Array, "*time k"], likelihood: Float[Array, "*time q1"], index: Any
    ) -> Float[Array, "*time K"]:
        """Coefficients of the next prior, from the coefficients of the basis functions at `index`."""
        if self.transition == "shift":
            return self.model.coefficients(
                contract(kept(self.moments.transition, "transition")[index], prior, likelihood)
            )
        code = contract(kept(self.moments.embedding, "embedding")[index], prior, likelihood)
        regressed = self.transition_factor.solve(code.reshape(-1, code.shape[-1]).T).T
        return self.model.coefficients(
            matmul(regressed, kept(self.moments.cross, "cross")).reshape(code.shape)
        )


def _landmarks(
    kernel: Any, points: Points, landmarks: Landmarks | RandomFourier | int
) -> Landmarks | RandomFourier:
    if isinstance(landmarks, (Landmarks, RandomFourier)):
        return landmarks
    return greedy_landmarks(kernel, points, rank=as_count(landmarks, "landmarks"))
