"""The rotation dynamics and the filters that know their true model.

Particle, extended and unscented Kalman, in NumPy.
"""

import numpy as np

NOISE = 0.2
FREQUENCY = 8.0
#: System: (eta, b).
OPTIMAL = "optimal (particle filter, true model)"
SYSTEMS = {"a": (0.3, 0.0), "b": (0.4, 0.4)}


def transition(states, system):
    """The noiseless successor of each state `[..., 2]`."""
    eta, b = SYSTEMS[system]
    angle = np.arctan2(states[..., 1], states[..., 0]) + eta
    radius = 1 + b * np.sin(FREQUENCY * angle)
    return radius[..., None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def simulate(system, steps, rng, warm_up=50):
    """States and observations `[steps, 2]` from the stationary regime."""
    angle = rng.uniform(0, 2 * np.pi)
    state, states = np.array([np.cos(angle), np.sin(angle)]), []
    for _ in range(warm_up + steps):
        state = transition(state, system) + NOISE * rng.normal(size=2)
        states.append(state)
    states = np.stack(states[warm_up:])
    return states, states + NOISE * rng.normal(size=states.shape)


def particle_filter(system, observations, rng, particles=2000):
    """Bootstrap particle filter with systematic resampling.

    The optimal filter up to Monte-Carlo error.
    """
    return np.stack([weights @ x for x, weights in _clouds(system, observations, rng, particles)])


def particle_smoother(system, observations, rng, lags, particles=700):
    """Estimates given the observations up to each lag after the state (None: all), by forward
    filtering and backward smoothing.

    Each particle is reweighted by the mean over where it may go (Doucet, Godsill and Andrieu 2000),
    so no path is sampled: the optimal smoother up to Monte-Carlo error. One row of weights for each
    number of later observations.
    """
    cloud = [
        (x.astype(np.float32), weights)
        for x, weights in _clouds(system, observations, rng, particles)
    ]
    longest = max(lag or 0 for lag in lags)
    rows = np.tile(cloud[-1][1], (longest + 2, 1))  # the last row: all observations
    estimates = [rows @ cloud[-1][0]]
    for (x, weights), (following, _) in zip(cloud[-2::-1], cloud[:0:-1], strict=True):
        ahead = transition(x, system).astype(np.float32)
        squares = sum(
            (a[:, None] - b[None, :]) ** 2 for a, b in zip(ahead.T, following.T, strict=True)
        )
        kernel = np.exp(-squares / np.float32(2 * NOISE**2))
        shares = rows / np.maximum(weights @ kernel, 1e-30)
        smoothed = weights * (np.vstack([shares[:longest], shares[-1:]]) @ kernel.T)
        rows = np.vstack([weights[None], smoothed / smoothed.sum(1, keepdims=True)])
        estimates.append(rows @ x)
    estimates = np.stack(estimates[::-1])
    return {lag: estimates[:, -1 if lag is None else lag] for lag in lags}


def _clouds(system, observations, rng, particles):
    x = simulate_cloud(system, particles, rng)
    return bootstrap([lambda x: transition(x, system)] * len(observations), x, observations, rng)


def bootstrap(moves, x, observations, rng):
    """Particles and weights after each observation.

    `moves` gives the noiseless motion before it, from the cloud x `[n, 2]` on.
    """
    particles = len(x)
    for move, observation in zip(moves, observations, strict=True):
        x = move(x) + NOISE * rng.normal(size=x.shape)
        log_weights = -np.sum((x - observation) ** 2, axis=1) / (2 * NOISE**2)
        weights = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        yield x, weights
        positions = (rng.random() + np.arange(particles)) / particles
        x = x[np.minimum(np.searchsorted(np.cumsum(weights), positions), particles - 1)]


def simulate_cloud(system, particles, rng, steps=30):
    """Particles from the stationary distribution."""
    angles = rng.uniform(0, 2 * np.pi, particles)
    x = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    for _ in range(steps):
        x = transition(x, system) + NOISE * rng.normal(size=x.shape)
    return x


def _update(mean, covariance, observation):
    gain = covariance @ np.linalg.inv(covariance + NOISE**2 * np.eye(2))
    return mean + gain @ (observation - mean), covariance - gain @ covariance


def extended_kalman(system, observations):
    """Extended Kalman filter, started at the first observation."""
    eta, b = SYSTEMS[system]
    mean, covariance, estimates = observations[0], NOISE**2 * np.eye(2), [observations[0]]
    for observation in observations[1:]:
        angle = np.arctan2(mean[1], mean[0]) + eta
        direction, normal = (
            np.array([np.cos(angle), np.sin(angle)]),
            np.array([-np.sin(angle), np.cos(angle)]),
        )
        slope = (
            b * FREQUENCY * np.cos(FREQUENCY * angle) * direction
            + (1 + b * np.sin(FREQUENCY * angle)) * normal
        )
        jacobian = np.outer(slope, np.array([-mean[1], mean[0]]) / max(mean @ mean, 1e-6))
        covariance = jacobian @ covariance @ jacobian.T + NOISE**2 * np.eye(2)
        mean, covariance = _update(transition(mean, system), covariance, observation)
        estimates.append(mean)
    return np.stack(estimates)


def unscented_kalman(system, observations):
    """Unscented Kalman filter (alpha 1, beta 0, kappa 1), started at the first observation."""
    spread = 3.0
    weights = np.array([1 - 2 / spread, *[0.5 / spread] * 4])
    mean, covariance, estimates = observations[0], NOISE**2 * np.eye(2), [observations[0]]
    for observation in observations[1:]:
        root = np.linalg.cholesky(spread * covariance).T
        points = transition(mean + np.vstack([np.zeros((1, 2)), root, -root]), system)
        mean = weights @ points
        covariance = (points - mean).T @ (weights[:, None] * (points - mean)) + NOISE**2 * np.eye(2)
        mean, covariance = _update(mean, covariance, observation)
        covariance = (covariance + covariance.T) / 2
        estimates.append(mean)
    return np.stack(estimates)
