r"""How often 95 % bands hold the whole curve, and what the estimates lose.

    python -m benchmarks.causal.bands

Four designs with a standard normal u that drives dose and outcome: real doses a = .8 u + noise with
Y = sin(a) + u + noise / 2 at 7 doses from -1.5 to 1.5; three arms with log odds 0, u and -u, and
Y = (0, 1, 1/2) + u + sin(2 u) + noise / 2. u is measured, or seen through two proxies
u + noise / 2; there the arms are two, with log odds u, and Y = a + u + noise / 2.
"""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr
from kbr_jax import causal

from .. import experiment

UNITS, REPETITIONS = 500, 300
DESIGNS = ("doses", "arms", "doses, proxies", "arms, proxies")
DOSES = jnp.linspace(-1.5, 1.5, 7)


def sample(design: str, key):
    """Doses, covariates or proxies, outcomes; doses and curve of the truth."""
    keys = jax.random.split(key, 5)
    u, *noise = (jax.random.normal(k, (UNITS,)) for k in keys)
    w, z = u + noise[0] / 2, u + noise[1] / 2
    if design.startswith("doses"):
        a = 0.8 * u + noise[2]
        y = jnp.sin(a) + u + noise[3] / 2
        truth = DOSES, jnp.sin(DOSES)
    elif design == "arms":
        a = jax.random.categorical(keys[3], jnp.stack([0 * u, u, -u], 1))
        means = jnp.array([0.0, 1.0, 0.5])
        y = means[a] + u + jnp.sin(2 * u) + noise[3] / 2
        truth = jnp.arange(3), means
    else:
        a = jax.random.bernoulli(keys[3], jax.nn.sigmoid(u)).astype(int)
        y = a + u + noise[3] / 2
        truth = jnp.arange(2), jnp.array([0.0, 1.0])
    return (a, w, z, y) if "proxies" in design else (a, u, None, y), truth


@eqx.filter_jit
def repetition(design: str, key):
    """Squared errors, whether bands hold the truth, and the share of intervals that do."""
    (a, w, z, y), (doses, curve) = sample(design, key)
    outcome = causal.fit_outcome_bridge(a, w, z, y)
    covariates = (None, w) if z is None else (w, z)
    treatment = causal.fit_treatment_bridge(a, *covariates, y)
    models = {
        "outcome bridge": outcome,
        "doubly robust": causal.doubly_robust(outcome, treatment),
    }
    found = {}
    for name, model in models.items():
        band = causal.confidence_band(model, doses, key=jax.random.fold_in(key, 1))
        apart = jnp.abs(band.mean - curve)
        found[name] = (
            jnp.mean(apart**2),
            jnp.all((band.lower <= curve) & (curve <= band.upper)),
            jnp.mean(apart <= 1.96 * band.error),
        )
    weighted = kbr.mean(causal.intervene(treatment, doses))
    found["treatment bridge"] = (jnp.mean((weighted - curve) ** 2),)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    results = {}
    for design in DESIGNS:
        rows = experiment.repeat(
            f"bands {design}", lambda s, d=design: repetition(d, jax.random.key(s)), REPETITIONS
        )
        results[design] = {
            name: dict(
                zip(
                    ("mse", "band", "interval"),
                    np.mean([row[name] for row in rows], axis=0).tolist(),
                    strict=False,
                )
            )
            for name in rows[0]
        }
        experiment.save("bands", results)
        print(design, results[design], flush=True)


if __name__ == "__main__":
    experiment.start(main)
