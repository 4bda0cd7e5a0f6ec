"""The timed calls, run by pytest-benchmark: `python -m benchmarks.suite`."""

import functools

import jax
import pytest

from benchmarks.suite.cases import CASES

jax.config.update("jax_enable_x64", True)
SIDES = ("kbr_jax", "yardstick")


@functools.lru_cache(1)
def prepared(case: str) -> dict:
    return dict(zip(SIDES, CASES[case](), strict=True))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("case", CASES)
def test_speed(case: str, side: str, benchmark) -> None:
    call = prepared(case)[side]
    benchmark.extra_info.update(case=case, side=side)
    benchmark(lambda: jax.block_until_ready(call()))
