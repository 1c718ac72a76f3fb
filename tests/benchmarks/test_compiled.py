"""The benchmark that compiles for devices that are not at hand; here it is given a CPU."""

import os

import jax
import pytest

BY_HAND = "hand-written bfloat16"
STORED = {
    "devices": {
        "tpu": {
            "name": "TPU v5e",
            "jax": "1.2.3",
            "models": {
                "GPT": {
                    "float32": {"peak_bytes": 4e9, "moved_bytes": 8e9, "cycles": 4e6},
                    BY_HAND: {"peak_bytes": 2e9, "moved_bytes": 4e9, "cycles": 2e6},
                    "jamp O2": {"peak_bytes": 1e9, "moved_bytes": 5e9, "cycles": 2e6},
                }
            },
        }
    }
}


@pytest.fixture
def compiled(monkeypatch):
    """The package, which sets the environment when it is imported."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    from benchmarks.compiled import __main__, devices, measure, models, render

    parts = {"main": __main__, "devices": devices, "measure": measure, "models": models, "render": render}
    return type("Compiled", (), parts)


def test_memory_and_traffic_of_a_compiled_step(compiled):
    workload = compiled.models.compiled_workloads(scale=16)[0]
    by_hand = next(one for one in compiled.measure.candidates() if one.name == BY_HAND)
    row = compiled.measure.measured(workload, by_hand, jax.devices()[0])
    weights = 4 * (3 * 256 * 256 + 3 * 256)
    assert row["peak_bytes"] > weights
    assert row["moved_bytes"] > 2 * weights  # They are read, and written.
    assert "cycles" not in row  # Which XLA estimates for TPUs.


@pytest.mark.nightly  # It traces every model.
def test_every_model_has_shapes(compiled):
    workloads = compiled.models.compiled_workloads(scale=16)
    assert [one.name for one in workloads] == ["SimpleNet", "ResNet", "LSTM", "GPT", "GPT, scanned", "ViT, scanned"]
    vit = workloads[-1].build(None, 2)
    assert jax.eval_shape(vit.apply, vit.params, *vit.inputs).shape == (2, 1000)


def test_what_is_compared(compiled):
    names = [candidate.name for candidate in compiled.measure.candidates()]
    assert names == ["float32", BY_HAND, "jamp O1", "jamp O2", "jamp O3", "jamp O2, attention fused"]


def test_tables_and_goals(compiled, capsys, tmp_path):
    compiled.render.show(STORED)
    assert "2.00" in capsys.readouterr().out
    passed = {goal.name: goal.passed for goal in compiled.render.goals(STORED)}
    assert list(passed.values()) == [True, False, True]
    section = compiled.render.section(STORED)
    assert "| TPU v5e | GPT | jamp O2 | 1.00 | 0.50 | 5.00 | 1.25 | 2.00 | 1.00 |" in section
    assert "**missed**: TPU v5e: moved GB of hand-written, largest 1.25" in section
    compiled.render.chart(STORED, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


def test_a_compiler_that_is_missing_is_named(compiled, monkeypatch):
    devices = compiled.devices.DEVICES
    monkeypatch.setitem(devices, "tpu", devices["tpu"].__class__("TPU v5e", "jax[tpu]", lambda: 1 / 0))
    with pytest.raises(SystemExit, match=r'pip install "jax\[tpu\]"'):
        compiled.main.descriptions(["tpu"])
