"""The study that compiles for another device than the one at hand; here it is given a CPU."""

import os

import jax
import pytest


@pytest.fixture
def h100(monkeypatch):
    """The module, which sets the environment when it is imported."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    from benchmarks.studies import h100

    return h100


def test_memory_and_traffic_of_a_compiled_step(h100, capsys):
    (workload,) = (workload for workload in h100.workloads(False) if workload.name == "SimpleNet")
    found = [candidate for candidate in h100.precisions() if candidate.name in ("float32", h100.BY_HAND)]
    rows = {one.name: h100.measured(workload, one, jax.devices()[0], largest=False) for one in found}
    weights = 4 * (3 * 512 * 512 + 3 * 512)
    for row in rows.values():
        assert row["peak_bytes"] > weights and row["traffic_bytes"] > 2 * weights  # They are read, and written.
    h100.print_results({"SimpleNet": rows})
    assert "hand-written bfloat16" in capsys.readouterr().out


def test_the_published_sizes_and_the_scanned_gpt_are_compiled(h100):
    assert [workload.name for workload in h100.chosen([], pytest.fail)] == [
        "SimpleNet",
        "ResNet-50",
        "LSTM",
        "GPT",
        "GPT, scanned",
    ]
    assert [candidate.name for candidate in h100.precisions()][-1] == "jamp O2 bfloat16, all"
