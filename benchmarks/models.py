"""Filters from arrays that more than one benchmark builds."""

from typing import Any

import jax.numpy as jnp

import kbr_jax as kbr


def importance_filter(
    kernels: Any,
    states: Any,
    observations: Any,
    *,
    ridges: Any,
    delta: Any,
    ranks: Any,
    truncation: Any,
    successors: Any = None,
    controls: Any = None,
) -> kbr.KernelBayesFilter:
    """Importance weights and a learned transition with a ridge of its own.

    `ridges` are of the emission and of the transition, `ranks` (or landmarks) of states and
    observations. `controls` are a kernel, the inputs, and the rank of the pairs.
    """
    states, observations = jnp.asarray(states), jnp.asarray(observations)
    if successors is None:
        states, observations, successors = states[:-1], observations[: len(states) - 1], states[1:]
    of_states, of_observations = (
        kbr.greedy_landmarks(kernel, points, rank=rank) if isinstance(rank, int) else rank
        for kernel, points, rank in zip(kernels, (states, observations), ranks, strict=True)
    )
    emission = kbr.fit_conditional(
        kernels[0],
        kernels[1],
        states,
        observations,
        regularizer=ridges[0],
        landmarks_x=of_states,
        landmarks_y=of_observations,
    )
    kernel, x, landmarks = kernels[0], states, of_states
    if controls is not None:
        kernel = kbr.TensorProduct((kernel, controls[0]))
        x = (states, jnp.asarray(controls[1])[: len(states)])
        landmarks = kbr.greedy_landmarks(kernel, x, rank=controls[2])
    transition = kbr.fit_conditional(
        kernel,
        kernels[0],
        x,
        successors,
        regularizer=ridges[1],
        landmarks_x=landmarks,
        landmarks_y=of_states,
    )
    return kbr.KernelBayesFilter(
        emission,
        transition,
        regularizer=delta,
        estimator="importance",
        clipping=kbr.Clipping(truncation=truncation),
    )


def moment_filter(
    maps: kbr.moments.MomentMaps, chunks: Any, *, epsilon: Any, delta: Any, **options: Any
) -> kbr.KernelBayesFilter:
    """The shifted filter on moments of chunks (state, observation, successor)."""
    moments = kbr.moments.collect_moments(maps, chunks)
    emission = kbr.moments.fit_conditional(moments, regularizer=epsilon)
    clips = maps.cells is not None
    options = {"clipping": kbr.Clipping(clips, 0.02 if clips else 0.0), **options}
    return kbr.KernelBayesFilter(emission, None, regularizer=delta, shift=True, **options)
