"""README and pages: examples run, names exist, numbers are the stored ones."""

import importlib
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kbr_jax as kbr
from benchmarks import report
from kbr_jax import plotting
from kbr_jax.learning import _candidates, _conditional, _filter, _posterior

ROOT = pathlib.Path(__file__).parents[1]
sys.path += [str(ROOT / "docs" / "figures"), str(ROOT / "docs" / "tutorials")]
import _stored  # noqa: E402
import pages  # noqa: E402

TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
API = sorted((ROOT / "docs" / "api").glob("*.md"))
#: What an example must have found.
FOUND = {
    "concepts.md": lambda n: abs(float(n["kbr"].mean(n["embedding"]))) < 0.2,
    "sharp-bits.md": lambda n: np.allclose(
        n["mean_at"](n["model"], n["x"][0, :1]), n["x"][0, 0], atol=0.1
    ),
    "guide/filters.md": lambda n: float(jnp.mean((n["estimates"] - n["new_states"]) ** 2)) < 0.2,
    "guide/look-alikes.md": lambda n: float(n["error"][-1]) < 0.3,
    "guide/conditional.md": lambda n: abs(float(n["kbr"].mean(n["posterior"])[0]) - 1) < 0.1,
    "guide/forecasts.md": lambda n: abs(float(jnp.mean(n["inside"])) - 0.9) < 0.15,
    "guide/features.md": lambda n: (
        n["errors"]["learned features"] < 0.5 * n["errors"]["Gaussian kernel"]
    ),
    "guide/tests.md": lambda n: float(n["result"].p_value) < 0.05,
    "guide/goodness-of-fit.md": lambda n: (
        n["kbr"].hypotheses.kernel_stein_discrepancy(n["log_density"], n["chain"][n["chosen"]]) < 1
    ),
    "guide/treatment.md": lambda n: (
        n["kbr"]
        .hypotheses.treatment_effect_test(
            n["kernel"], n["x"], n["treated"], n["wider"], key=n["keys"][4]
        )
        .p_value
        < 0.05
    ),
    "guide/causal.md": lambda n: bool(
        jnp.all((n["band"].lower < jnp.sin(n["doses"])) & (jnp.sin(n["doses"]) < n["band"].upper))
    ),
    "guide/conditional-independence.md": lambda n: n["given"].p_value < 0.05,
    "guide/change-points.md": lambda n: (
        np.abs(n["found"].changes - np.array([100, 200, 300])).max() < 10
    ),
    "guide/propagation.md": lambda n: np.abs(n["estimate"] - n["truth"]).mean() < 0.12,
    "guide/drift.md": lambda n: (
        abs(float(n["kbr"].mean(n["future"])) - 3.6) < 0.3 and n["classes"].tolist() == [0, 1]
    ),
    "guide/likelihood-free.md": lambda n: abs(float(n["kbr"].mean(n["posterior"])) - 1.13) < 0.15,
    "guide/kernels.md": lambda n: bool(
        float(n["tuned"].value) < 0.7 * n["tuned"].history.loss[0]
        and jnp.all(jnp.abs(n["trained"].parameters["shift"] - 2) < 0.2)
        and n["test"].p_value > 0.05
    ),
}


@pytest.fixture
def quick(monkeypatch):
    """Searches of a few candidates."""
    for module, trials in ((_conditional, 4), (_filter, 8), (_posterior, 4)):
        for name, value in (("TRIALS", trials), ("REFINEMENTS", 2), ("STEPS", 2)):
            monkeypatch.setattr(module, name, value)
    for name, value in (("LEAST", 10**9), ("RANK", 40), ("ACTIVE", 40)):
        monkeypatch.setattr(_candidates, name, value)


@pytest.mark.parametrize("page", [name for name in pages.PAGES if name != "quick-start.md"])
def test_examples_of_a_page_run(page, quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page == "guide/causal.md":  # half of the data
        text = [block.replace("(600,)", "(300,)") for block in pages.blocks(page)]
        monkeypatch.setattr(pages, "blocks", lambda page: text)
    names = pages.run(page)
    assert FOUND[page](names)


def test_quick_start(quick, tmp_path, monkeypatch):
    """With less data, which is all that it differs in.

    The learned filter beats its rivals, its report is read and drawn, and it is saved.
    """
    monkeypatch.chdir(tmp_path)
    text = [
        block.replace("size=600", "size=280").replace("400", "200").replace("403", "203")
        for block in pages.blocks("quick-start.md")
    ]
    monkeypatch.setattr(pages, "blocks", lambda page: text)
    names = pages.run("quick-start.md")
    report, truth = names["report"], names["states"][200:]
    error = np.linalg.norm(names["estimates"] - truth, axis=1).mean()
    own, ridge = report.errors["filter"][0], report.errors["ridge regression, one observation"][0]
    assert own < 0.7 * ridge and error < 1.5 * own
    assert report.recovered >= 0.8
    for nominal, share in report.coverage.items():
        assert abs(share - nominal) < 0.25
    for words in ("held-out error", "ridge regression, last 4", "back from a wrong", "truncation"):
        assert words in str(report)
    assert plotting.plot_report(report).get_xlabel() == "held-out error"
    few = names["observations"][200:210]
    found, expected = (kbr.run_filter(f, few).weights for f in (names["again"], names["filt"]))
    np.testing.assert_array_equal(found, expected)
    # The home page, with this filter.
    monkeypatch.setattr(kbr, "learn_filter", lambda *data: (names["filt"], report))
    home = {"states": None, "observations": None, "new_observations": names["observations"][200:]}
    exec(
        re.findall(r"```python\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)[0], home
    )
    np.testing.assert_array_equal(home["estimates"], names["estimates"])


def readme_blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_first_example_finds_the_mode_that_the_prior_allows(capsys):
    names: dict = {}
    exec(readme_blocks()[0], names)
    assert capsys.readouterr().out
    at = kbr.evaluate(names["posterior"], jnp.asarray([[-1.0], [0.0], [1.0]]))
    assert float(at[2]) > 0.8 and float(jnp.max(jnp.abs(at[:2]))) < 0.1
    np.testing.assert_allclose(kbr.mean(names["posterior"]), [1.0], atol=0.1)


def test_filter_example():
    keys = jax.random.split(jax.random.key(0), 4)
    names = {
        "jax": jax,
        "kbr": kbr,
        "states": jax.random.normal(keys[0], (151, 2)),
        "observations": jax.random.normal(keys[1], (150, 2)),
        "new_observations": jax.random.normal(keys[2], (5, 2)),
        "many_sequences": jax.random.normal(keys[3], (3, 5, 2)),
    }
    exec(readme_blocks()[1], names)
    assert names["estimates"].shape == (5, 2) and names["batch"].shape == (3, 5, 2)
    assert bool(jnp.all(jnp.isfinite(names["batch"])))
    assert names["smoothed"].weights.shape[0] == 5


def test_learning_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    angle = np.cumsum(0.3 + 0.2 * rng.normal(size=121))
    states = jnp.asarray(np.stack([np.cos(angle), np.sin(angle)], 1))
    seen = states + 0.3 * jnp.asarray(rng.normal(size=states.shape))
    names = {
        "kbr": kbr,
        "optax": optax,
        "states": states[:81],
        "observations": seen[:80],
        "validation_states": states[81:],
        "validation_observations": seen[81:],
    }
    exec(readme_blocks()[2], names)
    tuned = names["tuned"]
    assert float(tuned.value) < 0.9 * float(tuned.history.loss[0])
    assert kbr.load("parameters.kbr") == jax.tree.map(float, tuned.parameters)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_on_a_page_exist(path):
    for name in set(re.findall(r"\bkbr\.([a-zA-Z_][\w.]*)", path.read_text())):
        if name in ("kbr", "org"):  # a file's ending
            continue
        found = kbr
        for part in name.rstrip(".").split("."):
            assert hasattr(found, part), f"kbr.{name}"
            found = getattr(found, part)


def test_every_public_name_is_on_one_page_of_the_reference():
    listed = re.findall(r"^::: (\S+)$", "\n".join(p.read_text() for p in API), re.MULTILINE)
    assert len(listed) == len(set(listed))
    by_package: dict[str, set[str]] = {}
    for name in listed:
        package, _, last = name.rpartition(".")
        by_package.setdefault(package, set()).add(last)
    for package, names in by_package.items():
        module = importlib.import_module(package)
        own = {
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == package and not name.startswith("_")
        }
        assert names == set(getattr(module, "__all__", own)), package
    folders = {path.parent.name for path in (ROOT / "kbr_jax").glob("*/__init__.py")}
    files = {p.stem for p in (ROOT / "kbr_jax").glob("*.py") if not p.name.startswith("_")}
    assert {f"kbr_jax.{name}" for name in folders | files} == set(by_package)


def test_one_version():
    assert f"version: {kbr.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {kbr.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("template", report.PAGES)
def test_numbers_are_those_of_the_results(template):
    text = (ROOT / report.PAGES[template]).read_text()
    assert text == report.rendered(template)
    for block in re.split(r"\n\s*\n", text):  # a table in one piece begins with its header
        rows = [line for line in block.split("\n") if line.startswith("|")]
        assert not rows or re.match(r"\|[ -]*---", rows[1])


@pytest.mark.parametrize("source", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda p: p.stem)
def test_stored_notebook_is_of_the_code(source):
    """`make notebooks` executes them; here only that what is stored is of this code."""
    assert _stored.is_current(source)
