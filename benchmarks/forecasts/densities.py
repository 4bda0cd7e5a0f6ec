r"""Six conditional densities, and how far each estimate is from the true distribution function.

    python -m benchmarks.forecasts.densities [repetitions]

The densities are those of the benchmark scripts of neural conditional probability (Kostic et al.
2024): `LinearGaussian`, `EconDensity`, `ArmaJump`, `SkewNormal`, `GaussianMixture` (its parameters
are drawn anew here) and `LGGMD` with 20 coordinates of x. 500 pairs, standardized. As there,
estimates are compared with the truth at 19 quantiles of x between 5 and 95 % (for `LGGMD` of each
of the first three coordinates, the others at their medians), on 1 000 values between the least and
the largest y: Hellinger, Wasserstein and Kolmogorov distances, means over x.

Peers; the networks hold out a fifth of the pairs for stopping or for choosing:

- neural conditional probability: two networks of two layers of 64, 100 features, the loss with
  penalty 1e-3 and Adam of rate 1e-3, as in the scripts, whitened; the density is
  p(y) (1 + u(x)^T v(y));
- a mixture density network of the same size, 10 or 20 components, weight decay 0 or 1e-3;
- conditional kernel density estimation (Nadaraya and Watson), bandwidths of x and of y by exact
  leave-one-out likelihood on all pairs, over a grid.
"""

import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

import kbr_jax as kbr
from kbr_jax.learning import learn_forecast
from kbr_jax.tuning import spectral_loss

from .. import experiment

PAIRS, GRID, QUERIES, REPETITIONS = 500, 1000, 19, 3
#: Parameters of the mixture: shares, means and variances of five normal densities.
MIXTURE = np.random.default_rng(20)
SHARES = MIXTURE.dirichlet(np.full(5, 3.0))
MEANS, SPREADS = MIXTURE.normal(0, 3, (5, 2)), np.sqrt(np.abs(MIXTURE.normal(1, 0.5, (5, 2))))


def linear(n, rng):
    """A slope and a spread that hardly change."""
    x = rng.uniform(-1, 1, (n, 1))
    return x, 0.005 * x[:, 0] + (0.1 + 0.002 * x[:, 0]) * rng.normal(size=n)


def econ(n, rng):
    """A parabola with noise that grows."""
    x = np.abs(rng.normal(size=(n, 1)))
    return x, x[:, 0] ** 2 + (1 + x[:, 0]) * rng.normal(size=n)


def arma_jump(n, rng):
    """An autoregression that jumps down; the pairs are shuffled."""
    series, jumps = np.zeros(n + 101), rng.uniform(size=n + 101) < 0.05
    noise = np.where(jumps, rng.normal(-0.3, 0.1, n + 101), rng.normal(0, 0.05, n + 101))
    for t in range(1, n + 101):
        series[t] = 0.01 + 0.9 * series[t - 1] + noise[t]
    order = rng.permutation(n)
    return series[100:-1, None][order], series[101:][order]


def skew_parameters(x):
    """Location, scale and skewness at x."""
    return 0.1 * x, 0.05 + 0.1 * x**2, -4 + 4 / (1 + np.exp(-x))


def skew_normal(n, rng):
    """All three of them change."""
    x = rng.normal(0, 0.5, (n, 1))
    place, scale, skew = skew_parameters(x[:, 0])
    return x, stats.skewnorm.rvs(skew, place, scale, random_state=rng)


def mixture(n, rng):
    """Five normal densities of (x, y)."""
    part = rng.choice(5, n, p=SHARES)
    points = MEANS[part] + SPREADS[part] * rng.normal(size=(n, 2))
    return points[:, :1], points[:, 1]


def locally_mixed(n, rng):
    """One mode or two, by three of 20 coordinates."""
    x = rng.uniform(-1, 1, (n, 20))
    one = rng.normal(0.25 * x[:, 0], 0.3)
    low = rng.normal(0.25 * x[:, 0] - 0.5, 0.25 * (0.25 * x[:, 2] + 0.5) ** 2)
    high = rng.normal(0.25 * x[:, 0] + 0.5, 0.25 * (0.25 * x[:, 2] - 0.5) ** 2)
    return x, np.where(x[:, 1] > 0.2, one, np.where(rng.uniform(size=n) < 0.5, low, high))


def mixture_cdf(x, y):
    """The distribution of y given x in the mixture."""
    shares = SHARES * stats.norm.pdf(x[0], MEANS[:, 0], SPREADS[:, 0])
    return stats.norm.cdf(y[:, None], MEANS[:, 1], SPREADS[:, 1]) @ (shares / shares.sum())


def locally_mixed_cdf(x, y):
    """The distribution of y given x, of one or two modes."""
    if x[1] > 0.2:
        return stats.norm.cdf(y, 0.25 * x[0], 0.3)
    low = stats.norm.cdf(y, 0.25 * x[0] - 0.5, 0.25 * (0.25 * x[2] + 0.5) ** 2)
    return (low + stats.norm.cdf(y, 0.25 * x[0] + 0.5, 0.25 * (0.25 * x[2] - 0.5) ** 2)) / 2


def _arma_cdf(x, y):
    mean = 0.01 + 0.9 * x[0]
    return 0.95 * stats.norm.cdf(y, mean, 0.05) + 0.05 * stats.norm.cdf(y, mean - 0.3, 0.1)


def _skew_cdf(x, y):
    place, scale, skew = skew_parameters(x[0])
    return stats.skewnorm.cdf(y, skew, place, scale)


DENSITIES: dict[str, tuple[Callable, Callable]] = {
    "LinearGaussian": (linear, lambda x, y: stats.norm.cdf(y, 0.005 * x[0], 0.1 + 0.002 * x[0])),
    "EconDensity": (econ, lambda x, y: stats.norm.cdf(y, x[0] ** 2, 1 + x[0])),
    "ArmaJump": (arma_jump, _arma_cdf),
    "SkewNormal": (skew_normal, _skew_cdf),
    "GaussianMixture": (mixture, mixture_cdf),
    "LGGMD": (locally_mixed, locally_mixed_cdf),
}


def ours(x, y, queries, grid, seed):
    """`learn_forecast`, nothing set."""
    forecast, _ = learn_forecast(x, y, progress=False)

    def at(point):
        return kbr.density(forecast(point), grid, bandwidth=forecast.bandwidth)

    return jax.lax.map(at, queries)


def kernel_density(x, y, queries, grid, seed):
    """Nadaraya and Watson's conditional density, by leave-one-out likelihood."""
    apart = jnp.sum((x[:, None] - x) ** 2, axis=2)
    unlike = (y[:, None] - y) ** 2

    def score(widths):
        near = jnp.exp(-apart / (2 * widths[0] ** 2)) * (1 - jnp.eye(len(y)))
        shares = near / (jnp.sum(near, axis=1, keepdims=True) + 1e-300)
        like = jnp.sum(shares * jnp.exp(-unlike / (2 * widths[1] ** 2)), axis=1) / widths[1]
        return jnp.mean(jnp.log(like + 1e-4))

    spread = jnp.sqrt(jnp.asarray(x.shape[1], x.dtype))
    grids = jnp.meshgrid(jnp.geomspace(0.03, 1.5, 16) * spread, jnp.geomspace(0.03, 1.0, 16))
    candidates = jnp.stack([g.ravel() for g in grids], axis=1)
    wide, narrow = candidates[jnp.argmax(jax.lax.map(score, candidates))]
    near = jnp.exp(-jnp.sum((queries[:, None] - x) ** 2, axis=2) / (2 * wide**2)) + 1e-300
    bumps = jnp.exp(-((y[:, None] - grid) ** 2) / (2 * narrow**2)) / narrow
    return near @ bumps / (jnp.sum(near, axis=1, keepdims=True) * np.sqrt(2 * np.pi))


def trained(start, loss, validation, key, rate=1e-3, decay=0.0, steps=3000, patience=400):
    """Adam on all pairs; the parameters with the least validation, stopped when it is old."""
    numbers, rest = eqx.partition(start, eqx.is_inexact_array)
    optimizer = optax.adamw(rate, weight_decay=decay)

    @jax.jit
    def ten(carry):
        def one(carry, _):
            numbers, state = carry
            gradient = jax.grad(lambda p: loss(eqx.combine(p, rest)))(numbers)
            move, state = optimizer.update(gradient, state, numbers)
            return (optax.apply_updates(numbers, move), state), None

        carry, _ = jax.lax.scan(one, carry, None, length=10)
        return carry, validation(eqx.combine(carry[0], rest))

    carry, best, value, since = (numbers, optimizer.init(numbers)), numbers, np.inf, 0
    for _ in range(steps // 10):
        carry, now = ten(carry)
        since += 10
        if float(now) < value:
            best, value, since = carry[0], float(now), 0
        if since > patience:
            break
    return eqx.combine(best, rest), value


def _network(inputs, outputs, key):
    return eqx.nn.MLP(inputs, outputs, 64, 2, jax.nn.gelu, key=key)


def neural_conditional_probability(x, y, queries, grid, seed):
    """Two networks, whitened, times a kernel density of y."""
    cut = len(y) - len(y) // 5
    keys = jax.random.split(jax.random.key(seed), 2)
    nets = _network(x.shape[1], 100, keys[0]), _network(1, 100, keys[1])

    def features(nets, x, y):
        return jax.vmap(nets[0])(x), jax.vmap(nets[1])(y[:, None])

    def loss(nets, rows):
        return spectral_loss(*features(nets, x[rows], y[rows]), penalty=1e-3 * 100)

    train, held = slice(0, cut), slice(cut, None)
    nets, _ = trained(nets, lambda n: loss(n, train), lambda n: loss(n, held), keys[0])
    u, v = features(nets, x[train], y[train])
    means = u.mean(0), v.mean(0)
    u, v = u - means[0], v - means[1]
    left, right = (jnp.linalg.eigh(f.T @ f / cut + 1e-6 * jnp.eye(100)) for f in (u, v))
    whiten = [vectors / jnp.sqrt(values) @ vectors.T for values, vectors in (left, right)]
    cross = whiten[0] @ (u.T @ v / cut) @ whiten[1]
    at = (jax.vmap(nets[0])(queries) - means[0]) @ whiten[0]
    on = (jax.vmap(nets[1])(grid[:, None]) - means[1]) @ whiten[1]
    marginal = jnp.asarray(stats.gaussian_kde(np.asarray(y[train]))(np.asarray(grid)))
    return jnp.maximum(1 + at @ cross @ on.T, 0) * marginal


def mixture_density_network(x, y, queries, grid, seed):
    """The best of four on the held-out fifth."""
    cut = len(y) - len(y) // 5

    def logs(net, x, y):
        weights, means, scales = jnp.split(jax.vmap(net)(x), 3, axis=1)
        scales = jax.nn.softplus(scales) + 1e-3
        parts = jax.nn.log_softmax(weights) - jnp.log(scales) - 0.5 * np.log(2 * np.pi)
        bumps = -0.5 * ((y[..., None] - means[:, None]) / scales[:, None]) ** 2
        return jax.nn.logsumexp(parts[:, None] + bumps, axis=2)

    best, value = None, np.inf
    for count in (10, 20):
        for decay in (0.0, 1e-3):
            net = _network(x.shape[1], 3 * count, jax.random.key(seed))
            net, now = trained(
                net,
                lambda n: -jnp.mean(logs(n, x[:cut], y[:cut, None])),
                lambda n: -jnp.mean(logs(n, x[cut:], y[cut:, None])),
                jax.random.key(seed),
                decay=decay,
            )
            if now < value:
                best, value = net, now
    return jnp.exp(logs(best, queries, jnp.broadcast_to(grid, (len(queries), len(grid)))))


METHODS = {
    "learn_forecast": ours,
    "neural conditional probability": neural_conditional_probability,
    "mixture density network": mixture_density_network,
    "conditional kernel density": kernel_density,
}


def distances(estimate: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Means over queries of three distances of distribution functions on the grid."""
    estimate = np.maximum(np.cumsum(np.nan_to_num(estimate), axis=1), 1e-300)
    estimate, truth = (f / f[:, -1:] for f in (estimate, truth))
    roots = [np.sqrt(np.maximum(np.diff(f, axis=1), 0)) for f in (estimate, truth)]
    return {
        "hellinger": float(np.sqrt(((roots[0] - roots[1]) ** 2).sum(1) / 2).mean()),
        "wasserstein": float(np.abs(estimate - truth).mean()),
        "kolmogorov": float(np.abs(estimate - truth).max(1).mean()),
    }


def queries_of(x: np.ndarray) -> np.ndarray:
    """Where distributions are compared."""
    levels, used = np.linspace(5, 95, QUERIES), min(x.shape[1], 3)
    points = np.tile(np.median(x, axis=0), (used * QUERIES, 1))
    for column in range(used):
        rows = slice(column * QUERIES, (column + 1) * QUERIES)
        points[rows, column] = np.percentile(x[:, column], levels)
    return points


def repetition(name: str, seed: int) -> dict[str, dict[str, float]]:
    """One data set and all methods."""
    draw, cdf = DENSITIES[name]
    x, y = draw(PAIRS, np.random.default_rng(seed))
    center, unit, middle, scale = x.mean(0), x.std(0), y.mean(), y.std()
    z, t = (x - center) / unit, (y - middle) / scale
    queries, grid = queries_of(z), np.linspace(t.min(), t.max(), GRID)
    truth = np.stack([cdf(q * unit + center, grid * scale + middle) for q in queries])
    found = {}
    for method, estimate in METHODS.items():
        start = time.perf_counter()
        values = estimate(*map(jnp.asarray, (z, t, queries, grid)), seed)
        values = np.asarray(jax.block_until_ready(values))
        found[method] = distances(values, truth) | {"seconds": time.perf_counter() - start}
    return found


def main(count: int = REPETITIONS) -> None:
    results = {}
    for name in DENSITIES:
        rows = experiment.repeat(f"densities {name}", lambda s, n=name: repetition(n, s), count)
        results[name] = {
            method: {
                key: [
                    float(np.mean([row[method][key] for row in rows])),
                    float(np.std([row[method][key] for row in rows], ddof=1) / np.sqrt(count))
                    if count > 1
                    else float("nan"),
                ]
                for key in rows[0][method]
            }
            for method in METHODS
        }
        experiment.save("densities", results)
        print(name, results[name], flush=True)


if __name__ == "__main__":
    experiment.start(main)
