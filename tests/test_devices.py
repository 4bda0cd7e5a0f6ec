"""Many devices and many processes give the results of one."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cores import all_cores

import kbr_jax as kbr

PROGRAM = pathlib.Path(__file__).parent / "devices_program.py"
MESH = jax.make_mesh((1,), ("cases",))


def launch(process, processes, port, devices, folder):
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(PROGRAM), *map(str, (process, processes, port, folder))]
    with all_cores():
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def test_eight_devices_of_two_processes_give_the_results_of_one(tmp_path):
    run = [launch(process, 2, 29817, 4, tmp_path) for process in range(2)]
    for process in run:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        assert "devices 8 processes 2" in out


def test_cases_need_a_common_leading_axis():
    for cases in (
        {},
        3.0,
        {"a": jnp.zeros(3), "b": jnp.zeros(2)},
        jnp.zeros(()),
        jnp.zeros((0, 2)),
    ):
        with pytest.raises(ValueError, match="`cases` must hold"):
            kbr.devices.over_devices(lambda shared, cases: cases, MESH, None, cases)


def test_devices_are_given_as_a_mesh():
    with pytest.raises(ValueError, match="`mesh` must be a"):
        kbr.devices.over_devices(lambda shared, x: x, jax.devices(), None, jnp.zeros(2))


def test_a_mesh_divides_lists_of_sequences_only():
    x = jnp.arange(5.0)
    kernel = kbr.Gaussian(1.0)
    filt = kbr.fit_filter(kernel, kernel, x, x, regularizer=0.1, posterior_regularizer=0.1)
    with pytest.raises(ValueError, match="`observations` as a list"):
        kbr.run_filter(filt, x, mesh=MESH)


def test_a_solver_on_a_mesh_is_not_saved(tmp_path):
    solver = kbr.ConjugateGradient(rank=2, mesh=MESH)
    x = np.linspace(0, 1, 5)
    model = kbr.fit_conditional(
        kbr.Gaussian(1.0), kbr.Gaussian(1.0), x, x, regularizer=0.1, solver=solver
    )
    with pytest.raises(ValueError, match="mesh"):
        kbr.save(tmp_path / "model", model)
