r"""Predictive domain adaptation: a classifier for a distribution that has not been observed yet
(PredSVM).

    python -m benchmarks.lampert.adaptation [repetitions]

Two Gaussian classes that turn about the origin, and the ten digits of scikit-learn turning: labeled
sets at six times, the test set is of the SVMs trained on each set, on the last, on all, on the test
distribution itself (the target), C by five-fold cross-validation as in the paper; and PredSVM:
dynamics of the joint embedding under $k_X \otimes 1[y = y']$, then a linear SVM on points with
signed weights, its C that of the last set, or found by predicting the last observed set from those
before it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

import kbr_jax as kbr

from .. import experiment

REPETITIONS, SETS, SIZE, TEST, RADIUS = 100, 6, 100, 2000, 1.5
PENALTIES = 10.0 ** np.arange(-2, 4)


def turning_classes(
    degrees: float, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Classes at +-1.5 on an axis that turns, unit noise.

    `SETS` sets, a target set of the next time and a test set of it.
    """
    sets = []
    for t, n in zip([*range(SETS), SETS, SETS], [SIZE] * (SETS + 1) + [TEST], strict=True):
        angle = np.deg2rad(degrees * t)
        y = rng.choice([-1, 1], n)
        sets.append(
            (
                RADIUS * y[:, None] * np.array([np.cos(angle), np.sin(angle)])
                + rng.normal(size=(n, 2)),
                y,
            )
        )
    return sets


def turning_digits(degrees: float, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every image serves once: 150 for each time, the rest for the test."""
    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(images))
    parts = np.split(order, np.arange(1, SETS + 2) * 150)
    sets = []
    for t, part in zip([*range(SETS), SETS, SETS], parts, strict=True):
        turned = [
            scipy.ndimage.rotate(images[i].reshape(8, 8), degrees * t, reshape=False, order=1)
            for i in part
        ]
        sets.append((np.stack(turned).reshape(len(part), -1) / 16, labels[part]))
    return sets


PROBLEMS = {
    "two classes, 10 degrees a step": lambda rng: turning_classes(10, rng),
    "two classes, 30 degrees a step": lambda rng: turning_classes(30, rng),
    "digits, 10 degrees a step": lambda rng: turning_digits(10, rng),
    "digits, 20 degrees a step": lambda rng: turning_digits(20, rng),
}


def plain(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> tuple[float, int]:
    """Accuracy of an SVM on given points, and which C it has."""
    x, y = train
    search = GridSearchCV(SVC(kernel="linear"), {"C": PENALTIES}, cv=5).fit(x, y)
    return float(np.mean(search.predict(test[0]) == test[1])), int(search.best_index_)


def joint_prediction(sets: list[tuple[np.ndarray, np.ndarray]], stacked: bool) -> kbr.Embedding:
    """The embedding of labeled points one step ahead.

    Bandwidth by the median heuristic on the last set.
    """
    observed = kbr.dynamics.sample_sequence([(jnp.asarray(x), jnp.asarray(y)) for x, y in sets])
    bandwidth = kbr.median_heuristic(jnp.asarray(sets[-1][0]))
    kernel = kbr.TensorProduct((kbr.Gaussian(bandwidth), kbr.Delta()))
    model = kbr.dynamics.fit_dynamics(kernel, observed)
    return kbr.dynamics.combine(
        kernel,
        observed,
        kbr.dynamics.stacked_forecast(model).coefficients
        if stacked
        else kbr.dynamics.forecast_coefficients(model)[0],
    )


predict = jax.jit(joint_prediction, static_argnums=1)


def one_against_the_rest(
    machine: Any, x: np.ndarray, labels: np.ndarray, weights: np.ndarray, test: np.ndarray
) -> np.ndarray:
    """PredSVM by a classifier of scikit-learn (L15 eq 12), without points of weight 0."""
    used, classes, values = weights != 0, np.unique(labels[weights != 0]), []
    for positive in classes[1:] if classes.size == 2 else classes:
        signs = np.where(labels[used] == positive, 1, -1)
        flipped, size = map(np.asarray, kbr.dynamics.flip_labels(signs, weights[used]))
        fitted = machine.fit(x[used], flipped, sample_weight=size)
        values.append(fitted.decision_function(np.asarray(test)))
    if classes.size == 2:
        return classes[(values[0] > 0).astype(int)]
    return classes[np.argmax(values, axis=0)]


def predicted(
    sets: list[tuple[np.ndarray, np.ndarray]], test: Any, stacked: bool, penalties: np.ndarray
) -> dict[str, np.ndarray]:
    """Accuracies of PredSVM one step after the sets, hinge and squared hinge, at each C (for
    weights that sum to 1).
    """
    embedding = predict(sets, stacked)
    (x, y), weights = embedding.points, embedding.weights
    arrays = np.asarray(x), np.asarray(y), np.asarray(weights)

    def hinge(penalty):
        return one_against_the_rest(SVC(kernel="linear", C=penalty), *arrays, test[0])

    def squared(penalty):
        return kbr.dynamics.classify(
            kbr.dynamics.fit_predicted_svm(x, y, weights, penalty=penalty), jnp.asarray(test[0])
        )

    return {
        name: np.asarray([np.mean(np.asarray(fit(penalty)) == test[1]) for penalty in penalties])
        for name, fit in (("", hinge), (", squared hinge", squared))
    }


def run(sets: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    *observed, target, test = sets
    together = (np.concatenate([x for x, _ in observed]), np.concatenate([y for _, y in observed]))
    found = {f"set {t + 1}": plain(one, test)[0] for t, one in enumerate(observed[:-1])}
    found["last set"], own = plain(observed[-1], test)
    found |= {"all sets": plain(together, test)[0], "the target itself": plain(target, test)[0]}
    scaled = PENALTIES * len(observed[-1][1])
    for stacked in (False, True):
        past = predicted(observed[:-1], observed[-1], stacked, scaled)
        for name, accuracies in predicted(observed, test, stacked, scaled).items():
            method = f"PredSVM{', stacked' if stacked else ''}{name}"
            found[method] = float(accuracies[own])
            found[f"{method}, C by prediction"] = float(accuracies[int(np.argmax(past[name]))])
    return found


def main(repetitions: int = REPETITIONS) -> None:
    results: dict[str, Any] = {}
    for name, make in PROBLEMS.items():
        count = repetitions if "classes" in name else max(2, repetitions // 5)
        rows = experiment.repeat(
            f"adaptation {name}",
            lambda seed, make=make: run(make(np.random.default_rng([3, seed]))),
            count,
        )
        values = {method: np.asarray([row[method] for row in rows]) for method in rows[0]}
        results[name] = {
            method: {
                "accuracy": float(v.mean()),
                "se": float(v.std(ddof=1) / np.sqrt(count)),
                "gain on the last set": float((v - values["last set"]).mean()),
                "se of the gain": float((v - values["last set"]).std(ddof=1) / np.sqrt(count)),
            }
            for method, v in values.items()
        }
        print(
            name,
            {m: f"{v['accuracy']:.3f} ± {v['se']:.3f}" for m, v in results[name].items()},
            flush=True,
        )
        experiment.save("adaptation", results)


if __name__ == "__main__":
    experiment.start(main)
