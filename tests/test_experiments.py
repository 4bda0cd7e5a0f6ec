"""The runner of the benchmarks."""

import importlib
import inspect
import pathlib

import numpy as np
import pytest

from benchmarks import experiment
from benchmarks.__main__ import APART, experiments

FOLDER = pathlib.Path(experiment.__file__).parent
#: Their peers are not installed for the tests; or the module measures its own imports.
NOT_IMPORTED = {"causal.ihdp", "forecasts.tables", "scale.first_call"}


def test_every_program_of_the_benchmarks_is_an_experiment():
    programs = [p for p in FOLDER.glob("*/*.py") if '__name__ == "__main__"' in p.read_text()]
    programs += FOLDER.glob("*/__main__.py")
    assert len(set(programs)) == len(experiments())
    assert set(APART) <= set(experiments())


@pytest.mark.parametrize("name", sorted({*experiments()} - NOT_IMPORTED - {"suite"}))
def test_every_experiment_runs_without_words_and_has_help(name, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    given = experiment.arguments(module.main, [])
    inspect.signature(module.main).bind(*given)
    with pytest.raises(SystemExit) as end:
        experiment.arguments(module.main, ["--help"])
    assert end.value.code == 0
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out


def test_words_have_the_types_of_the_parameters(capsys):
    def main(count: int = 3, *variances: float) -> None: ...

    assert experiment.arguments(main, []) == [3]
    assert experiment.arguments(main, ["5", "1e-3", "2"]) == [5, 1e-3, 2.0]
    with pytest.raises(SystemExit):
        experiment.arguments(main, ["five"])
    assert "invalid int value: 'five'" in capsys.readouterr().err


def test_a_run_that_was_cut_off_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "UNFINISHED", tmp_path)
    monkeypatch.setattr(experiment, "commit", lambda: "abc")
    seen = []

    def repetition(seed):
        seen.append(seed)
        if seed == 2 and len(seen) == 3:
            raise KeyboardInterrupt
        return {"error": np.float64(seed) / 3}

    with pytest.raises(KeyboardInterrupt):
        experiment.repeat("cell", repetition, 4)
    rows = experiment.repeat("cell", repetition, 4)
    assert seen == [0, 1, 2, 2, 3]
    assert rows == [{"error": seed / 3} for seed in range(4)]
    # Of other code nothing is taken over.
    monkeypatch.setattr(experiment, "commit", lambda: "abc+")
    assert experiment.repeat("cell", lambda seed: "new", 2) == ["new", "new"]


def test_paired_summaries():
    errors, base = np.asarray([1.0, 2.0, 4.0]), np.asarray([2.0, 2.0, 3.0])
    found = experiment.paired(errors, base)
    assert found["ratio"] == 1.0
    assert found["difference"] == pytest.approx(0.0)
    assert found["difference_se"] == pytest.approx(np.std([-1, 0, 1], ddof=1) / np.sqrt(3))
    assert found["ratio_se"] == pytest.approx(np.std([-1, 0, 1], ddof=1) / np.sqrt(3) / base.mean())
