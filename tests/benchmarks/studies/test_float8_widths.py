"""Products in float8 by width."""

import json

import pytest

from benchmarks.studies import float8_widths
from benchmarks.studies.render import float8_widths as float8_widths_section


@pytest.mark.nightly
def test_each_product_and_gradient_is_stored(monkeypatch, tmp_path):
    path = tmp_path / "widths.json"
    monkeypatch.setattr(float8_widths, "ROWS", 64)
    monkeypatch.setattr(float8_widths, "LENGTH", 8)
    monkeypatch.setattr(float8_widths, "LAYERS", 1)
    arguments = ["widths", "--widths", "64", "--products", "32", "--settings", "2", "--kernels", "--json", str(path)]
    monkeypatch.setattr("sys.argv", arguments)
    float8_widths.main()
    stored = json.loads(path.read_text())
    (widths,) = stored["runs"].values()
    assert len(widths["32"]["products"]) == 9 and not widths["32"]["gradients"]
    assert all(found["ms"] > 0 for found in widths["32"]["products"].values())
    half, eight = widths["64"]["gradients"].values()
    assert half["ms"] > 0 and eight["temporary MB"] > 0
    assert not widths["64"]["products"]
    assert "| as XLA chooses | 64 | matmul=float8 |" in float8_widths_section(stored)
