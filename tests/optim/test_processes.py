"""Real processes that talk through gloo: one gets an inf, all skip, and parameters stay the same, bit for bit."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "distributed.py"


def run_example(*arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "processes, devices, policy", [(2, 2, "O3:bfloat16"), pytest.param(4, 1, "O2:float16", marks=pytest.mark.nightly)]
)
def test_processes_skip_together_and_stay_the_same(processes, devices, policy):
    arguments = ("--processes", str(processes), "--devices", str(devices), "--policy", policy, "--steps", "12")
    out = run_example(*arguments)
    rows = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    assert [int(row[1]) for row in rows] == [rank for rank in range(processes) for _ in range(devices)]
    assert len({row[3] for row in rows}) == 1
    assert "steps 12, skipped 1, loss scale" in out
    assert "All parameters are the same, bit for bit." in out


@pytest.mark.parametrize("arguments", [(), ("--devices", "8")])
def test_the_same_script_runs_in_one_process(arguments):
    assert "skipped 1" in run_example("--steps", "12", *arguments)
