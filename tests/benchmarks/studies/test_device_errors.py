"""Errors of gradients on the device at hand."""

import json

import jax.numpy as jnp

from benchmarks.models import Model
from benchmarks.studies import device_errors
from benchmarks.studies.render import device_errors as section
from benchmarks.zoo import Entry


def test_errors_are_those_of_half_and_float32_is_exact_on_a_cpu(monkeypatch, tmp_path):
    def build(dtype):
        params = jnp.linspace(-1, 1, 64).reshape(8, 8)
        return Model(lambda w, x: jnp.tanh(x @ w), params, (jnp.linspace(0, 1, 24).reshape(3, 8),))

    broken = Entry("none/broken", lambda dtype: 1 / 0, native=False)
    entries = [Entry("none/tanh", build, native=False), broken]
    monkeypatch.setattr(device_errors.zoo, "load", lambda: (entries, {}))
    monkeypatch.setattr("sys.argv", ["device_errors", "--draws", "1", "--json", str(tmp_path / "errors.json")])
    device_errors.main()
    models = json.loads((tmp_path / "errors.json").read_text())["models"]
    assert models["none/broken"] == {"float32": "ZeroDivisionError: division by zero"}
    errors = models["none/tanh"]
    assert errors["float32, as the device has it"] == 0 and "native" not in errors
    assert 0.001 < errors["O2:bfloat16"] < 0.01 and errors["O2:float16"] < errors["O2:bfloat16"] / 4


def test_the_section_has_a_row_for_each_model():
    rows = {"b": {"native": 0.01, "O2": 0.005}, "a": {"O2": 0.02}}
    lines = section({"device": "Chip", "jax": "1", "models": rows}).splitlines()
    assert lines[0] == "## Chip: errors of gradients"
    assert lines[-2:] == ["| a |  | 2.000 |", "| b | 1.000 | 0.500 |"]
