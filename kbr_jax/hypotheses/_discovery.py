"""The tests of independence as those of causal-learn and pgmpy (extra `discovery`)."""

import zlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import as_count, is_concrete
from .._typing import PRNGKeyArray
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
    numbers = np.asarray(jax.random.key_data(key) if _is_typed(key) else key).tolist()
    settings = f"{draws} {sorted(labels)} {numbers}"
    name = f"kbr_jax {settings}"

    class Test(CIT_Base):
        def __init__(self, data, **options):
            super().__init__(data, **options)
            self.check_cache_method_consistent("kbr_jax", settings)
            self.assert_input_data_is_valid()
            coded: dict[Hashable, np.ndarray] = {
                i: _codes(column) if i in labels else column for i, column in enumerate(data.T)
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
      labels: their values are only equal or not.
    - `key`: the same tests have the same draws. `num_draws`: of permutations and of signs.

    **Returns:** a function for `PC(ci_test=...)`: is the p-value at least `significance_level`?
    Use it with the rule of orientation that pgmpy has by default.

    **Raises:** `ValueError` for columns of different sizes.
    """
    columns = {name: _numbers(np.asarray(data[name])) for name in data}
    real = {name: np.issubdtype(x.dtype, np.floating) for name, x in columns.items()}
    for x in columns.values():
        if np.issubdtype(x.dtype, np.integer):
            warn_of_amounts(jnp.asarray(x))
    coded = {name: x if real[name] else _codes(x) for name, x in columns.items()}
    p_value = _p_value_of(coded, key, as_count(num_draws, "num_draws"))

    def test(X, Y, Z=(), significance_level: float = 0.05, **_) -> bool:
        return p_value(X, Y, tuple(Z)) >= significance_level

    return test


def _is_typed(key: PRNGKeyArray) -> bool:
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def _numbers(column: np.ndarray) -> np.ndarray:
    """Objects that are all real numbers as such a column."""
    if column.dtype != object:
        return column
    if any(one is None for one in column):
        raise ValueError("A column holds None: leave out its rows, or give it a label.")
    real = all(isinstance(one, (float, np.floating)) for one in column)
    return column.astype(float) if real else column


def _codes(column: np.ndarray) -> np.ndarray:
    return np.unique(column, return_inverse=True)[1]


def _p_value_of(columns: Mapping[Hashable, np.ndarray], key: PRNGKeyArray, draws: int) -> _PValue:
    if not is_concrete(key):
        raise ValueError("`key` is traced: search for causes outside of `jax.jit`.")

    def p_value(x, y, z) -> float:
        # The order of a pair and of a condition does not matter.
        x, y = sorted((x, y), key=repr)
        z = sorted(z, key=repr)
        own = jax.random.fold_in(key, zlib.crc32(repr((x, y, z)).encode()))
        pair = columns[x], columns[y]
        if not z:
            return float(
                independence_test(None, None, *pair, key=own, num_permutations=draws).p_value
            )
        real = [columns[i] for i in z if np.issubdtype(columns[i].dtype, np.floating)]
        given = [np.column_stack(real)] if real else []
        given += [columns[i] for i in z if not np.issubdtype(columns[i].dtype, np.floating)]
        found = conditional_independence_test(
            None, None, None, *pair, tuple(given), key=own, num_draws=draws
        )
        return float(found.p_value)

    return p_value
