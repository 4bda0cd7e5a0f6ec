"""The tests of independence as those of causal-learn and pgmpy (extra `discovery`)."""

import decimal
import numbers
import zlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import as_count, is_concrete
from .._typing import Array, PRNGKeyArray
from ..kernels._defaults import warn_of_amounts
from ._conditional import conditional_independence_test
from ._independence import independence_test

#: p-value of columns x and y, given columns z.
_PValue = Callable[[Hashable, Hashable, Sequence[Hashable]], float]


def causal_learn_test(
    *, key: PRNGKeyArray, labels: Collection[int] = (), num_draws: int = 1000
) -> str:
    """Register the tests with causal-learn, and return their name for it.

    Pairs without a condition are tested by `independence_test`, others by
    `conditional_independence_test`, with kernels that the data choose.

    **Arguments:**

    - `key`: the same tests on the same data have the same draws.
    - `labels`: numbers of the columns whose values are only equal or not.
    - `num_draws`: of permutations and of signs.

    **Returns:** the name: `pc(data, indep_test=name)`. Each size of the condition compiles once.

    **Raises:** `ImportError` without causal-learn 0.1.4.
    """
    from causallearn.utils.cit import CIT_Base, register_ci_test

    draws, labels = as_count(num_draws, "num_draws"), frozenset(labels)
    words = np.asarray(jax.random.key_data(key) if _is_typed(key) else key).tolist()
    settings = f"{draws} {sorted(labels, key=repr)} {words}"
    name = f"kbr_jax {settings}"

    class Test(CIT_Base):
        def __init__(self, data, **options):
            super().__init__(data, **options)
            self.check_cache_method_consistent("kbr_jax", settings)
            self.assert_input_data_is_valid()
            if not labels <= set(range(data.shape[1])):
                raise ValueError(
                    f"`labels` must be numbers of the {data.shape[1]} columns, from 0; got "
                    f"{sorted(labels, key=repr)}."
                )
            coded: dict[Hashable, np.ndarray] = {
                i: _codes(column) if i in labels else column.astype(float)
                for i, column in enumerate(data.T)
            }
            self.test = _p_value_of(coded, key, draws)

        def __call__(self, X, Y, condition_set=None):
            first, second, given, entry = self.get_formatted_XYZ_and_cachekey(X, Y, condition_set)
            if entry not in self.pvalue_cache:
                found = self.test(first[0], second[0], given)
                self.pvalue_cache[entry] = found  # pyright: ignore[reportArgumentType]
            return self.pvalue_cache[entry]

    register_ci_test(name, Test)
    return name


def pgmpy_test(data: Any, *, key: PRNGKeyArray, num_draws: int = 1000) -> Callable[..., bool]:
    """The tests as a `ci_test` of pgmpy, for one data frame.

    Pairs without a condition are tested by `independence_test`, others by
    `conditional_independence_test`, with kernels that the data choose.

    **Arguments:**

    - `data`: a data frame, or arrays `[n]` by name. Columns that do not hold real numbers are
      labels: their values are only equal or not. Integers and dates are labels too.
    - `key`: the same tests have the same draws. `num_draws`: of permutations and of signs.

    **Returns:** a function for `PC(ci_test=...)`: is the p-value at least `significance_level`?
    Use it with the rule of orientation that pgmpy has by default.

    **Raises:** `ValueError` for columns of different sizes, and for missing values.
    """
    columns = {name: _column(np.asarray(data[name]), name) for name in data}
    sizes = {len(x) for x in columns.values()}
    if len(sizes) > 1:
        raise ValueError(f"The columns of `data` have different sizes: {sorted(sizes)}.")
    coded = {}
    for name, x in columns.items():
        coded[name] = x if np.issubdtype(x.dtype, np.floating) else _codes(x)
        if x.dtype.kind in "iuM":
            warn_of_amounts(jnp.asarray(coded[name]))
    p_value = _p_value_of(coded, key, as_count(num_draws, "num_draws"))

    def test(X, Y, Z=(), significance_level: float = 0.05, **_) -> bool:
        return p_value(X, Y, tuple(Z)) >= significance_level

    return test


def _is_typed(key: PRNGKeyArray) -> bool:
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def _column(column: np.ndarray, name: Hashable) -> np.ndarray:
    """A column without missing values; objects that are all real numbers as such a column."""
    if column.dtype.kind == "O":
        # NaN differs from itself. Tables have words for what is missing too.
        gaps = [one is None or type(one).__name__ in ("NAType", "NaTType") for one in column]
        gaps = [gap or _is_nan(one) for gap, one in zip(gaps, column, strict=True)]
    else:
        gaps = column != column
    if np.any(gaps):
        raise ValueError(
            f"Column {name!r} has no value in row {int(np.argmax(gaps))}: leave out such rows, or "
            f"give them a label."
        )
    real = numbers.Real, decimal.Decimal
    if column.dtype.kind != "O" or not all(
        isinstance(one, real) and not isinstance(one, (bool, np.bool_)) for one in column
    ):
        return column
    found = np.asarray(column.tolist())
    if found.dtype.kind not in "iu" and all(isinstance(one, numbers.Integral) for one in column):
        return column  # too large for an array
    return found.astype(float) if found.dtype == object else found  # decimals and fractions


def _is_nan(value: Any) -> bool:
    # One that signals does not compare.
    return value.is_nan() if isinstance(value, decimal.Decimal) else bool(value != value)


def _codes(column: np.ndarray) -> np.ndarray:
    if column.dtype != object:
        return np.unique(column, return_inverse=True)[1]
    found: dict[Hashable, int] = {}  # labels of several types have no order
    return np.array([found.setdefault(label, len(found)) for label in column])


def _p_value_of(columns: Mapping[Hashable, np.ndarray], key: PRNGKeyArray, draws: int) -> _PValue:
    if not is_concrete(key):
        raise ValueError("`key` is traced: search for causes outside of `jax.jit`.")

    def exact(p_value: Array) -> float:
        # One of k / (draws + 1): a search compares it with a level, which float32 may not hold.
        found = float(p_value) * (draws + 1)
        return round(found) / (draws + 1) if np.isfinite(found) else found

    def p_value(x, y, z) -> float:
        # The order of a pair and of a condition does not matter.
        x, y = sorted((x, y), key=repr)
        z = sorted(z, key=repr)
        own = jax.random.fold_in(key, zlib.crc32(repr((x, y, z)).encode()))
        pair = columns[x], columns[y]
        if not z:
            return exact(
                independence_test(None, None, *pair, key=own, num_permutations=draws).p_value
            )
        real = [columns[i] for i in z if np.issubdtype(columns[i].dtype, np.floating)]
        given = [np.column_stack(real)] if real else []
        given += [columns[i] for i in z if not np.issubdtype(columns[i].dtype, np.floating)]
        found = conditional_independence_test(
            None, None, None, *pair, tuple(given), key=own, num_draws=draws
        )
        return exact(found.p_value)

    return p_value
