"""The tests of independence inside the searches of causal-learn and pgmpy."""

import warnings
from decimal import Decimal
from fractions import Fraction

import jax
import numpy as np
import pytest

import kbr_jax as kbr
from kbr_jax.hypotheses._discovery import _column, _p_value_of

KEY = jax.random.key(3)
# Both packages, and what they import, warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")


def collider(n=200):
    """A and b cause c, and c causes d, a label."""
    rng = np.random.default_rng(0)
    a, b, noise, own = rng.normal(size=(4, n))
    c = np.tanh(2 * a) + b + 0.3 * noise
    return a, b, c, np.where(c + 0.3 * own > 0, "yes", "no")


#: Edges between the numbers of columns, of which those into 2 are known to point there.
SKELETON = {frozenset(pair) for pair in ((0, 2), (1, 2), (2, 3))}


def test_causal_learn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from causallearn.search.ConstraintBased.PC import pc

    a, b, _, d = collider()
    data = np.column_stack([a, b, d == "yes"]).astype(float)
    name = kbr.hypotheses.causal_learn_test(key=KEY, labels=[2], num_draws=99)
    graph = pc(data, alpha=0.02, indep_test=name, show_progress=False).G.graph
    found = {frozenset(map(int, pair)) for pair in zip(*np.nonzero(graph), strict=True)}
    assert found == {frozenset(pair) for pair in ((0, 2), (1, 2))}
    assert graph[2, 0] == graph[2, 1] == 1 and graph[0, 2] == graph[1, 2] == -1  # arrows into d
    # Integers are numbers, unless their column is one of `labels`.
    table = np.round(20 * np.column_stack([a, a + 0.3 * b, b])).astype(int)
    name = kbr.hypotheses.causal_learn_test(key=KEY, num_draws=99)
    graph = pc(table, alpha=0.02, indep_test=name, show_progress=False).G.graph
    assert graph[0, 1] != 0
    name = kbr.hypotheses.causal_learn_test(key=KEY, labels=[3], num_draws=99)
    with pytest.raises(ValueError, match="`labels` must be numbers of the 3 columns"):
        pc(table, indep_test=name, show_progress=False)


def test_pgmpy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pandas as pd
        from pgmpy.causal_discovery import PC

    frame = pd.DataFrame(dict(zip("abcd", collider(), strict=True)))
    test = kbr.hypotheses.pgmpy_test(frame, key=KEY, num_draws=99)
    assert test("a", "b", []) and not test("a", "c", []) and test("a", "d", ["c"])
    assert test("a", "d", ("c", "b"), 0.01) == test("d", "a", ("b", "c"), 0.01)
    model = PC(ci_test=test, significance_level=0.02, show_progress=False).fit(frame)
    found = {frozenset("abcd".index(node) for node in edge) for edge in model.causal_graph_.edges()}
    assert found == SKELETON


def test_columns_must_have_one_size():
    with pytest.raises(ValueError, match=r"different sizes: \[5, 6\]"):
        kbr.hypotheses.pgmpy_test({"a": np.ones(5), "b": np.ones(6)}, key=KEY)


def test_columns_of_objects_and_amounts():
    rng = np.random.default_rng(3)
    x = rng.normal(size=60)
    columns = {"x": x.astype(object), "y": x + 0.1, "n": np.arange(60)}
    with pytest.warns(UserWarning, match="taken as labels"):
        test = kbr.hypotheses.pgmpy_test(columns, key=jax.random.key(0), num_draws=99)
    assert not test("x", "y")
    dates = np.datetime64("2020-01-01") + np.arange(60)
    for column in (dates, np.arange(60).astype(object)):
        with pytest.warns(UserWarning, match="60 values among 60 points are taken as labels"):
            kbr.hypotheses.pgmpy_test({"x": column, "y": x}, key=KEY)
    # Integers and numbers with fractions are numbers.
    mixed = np.array([1, 2.5, *x[2:]], object)
    kbr.hypotheses.pgmpy_test({"x": mixed, "y": x}, key=KEY, num_draws=99)("x", "y")


def test_labels_of_several_types():
    column = np.array([1, "u"] * 20, dtype=object)
    kbr.hypotheses.pgmpy_test({"a": np.arange(40.0), "m": column}, key=KEY)


@pytest.mark.parametrize("missing", [None, np.nan, "NA", np.datetime64("NaT", "D")])
def test_a_missing_value_is_named(missing):
    column = np.array(["a", "b", missing], object)
    if missing == "NA":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pandas as pd
        column[2] = pd.NA
    elif isinstance(missing, np.datetime64):
        column = np.array(["2020-01-01", "2020-01-02", missing], "datetime64[D]")
    with pytest.raises(ValueError, match="Column 'x' has no value in row 2"):
        kbr.hypotheses.pgmpy_test({"x": column, "y": np.ones(3)}, key=KEY)


@pytest.mark.parametrize("kind", [lambda value: Decimal(str(value)), Fraction])
def test_exact_numbers_are_numbers(kind):
    rng = np.random.default_rng(3)
    x = rng.normal(size=60).round(2)
    columns = {"x": x, "y": (x + 0.3 * rng.normal(size=60)).round(2)}
    columns = {
        name: np.array([kind(value) for value in column.tolist()], object)
        for name, column in columns.items()
    }
    assert not kbr.hypotheses.pgmpy_test(columns, key=KEY, num_draws=99)("x", "y")


def test_large_whole_numbers_are_labels():
    column = np.array([2**70, 2**70 + 1], object)
    assert _column(column, "x") is column
    with pytest.raises(ValueError, match="no value in row 0"):
        _column(np.array([Decimal("sNaN"), Decimal(1)], object), "x")


@pytest.mark.parametrize(("draws", "level"), [(19, 0.05), (99, 0.01)])
def test_a_p_value_that_equals_the_level(draws, level):
    """In float32 .05 is above .05, and .01 below .01."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=60)
    p_value = _p_value_of({"x": np.float32(x), "y": np.float32(x)}, KEY, draws)
    assert p_value("x", "y", ()) == level
    z = {"x": np.float32(x), "y": np.float32(x), "z": np.float32(rng.normal(size=60))}
    assert _p_value_of(z, KEY, draws)("x", "y", ("z",)) == level
