"""Forms of attention on the device at hand."""

import json

import pytest

from benchmarks.studies import attention_forms
from benchmarks.studies.render import attention_forms as section


@pytest.mark.nightly
def test_fused_is_as_exact_as_written_on_a_cpu(monkeypatch, tmp_path):
    path = tmp_path / "forms.json"
    forms = ["one query", "padding on the left, odd, bias"]
    monkeypatch.setattr("sys.argv", ["forms", "--length", "64", "--time", "16", "--only", *forms, "--json", str(path)])
    attention_forms.main()
    stored = json.loads(path.read_text())
    assert list(stored["forms"]) == forms
    for row in stored["forms"].values():
        for half, largest in (("bfloat16", 0.01), ("float16", 0.002)):
            written, fused = row[half].values()
            assert not fused["kernel"] and 0 < max(fused["errors"]) < largest
            assert max(fused["errors"]) < 1.1 * max(written["errors"])
    lines = section(stored).splitlines()
    assert lines[-2].startswith("| one query | 0.") and lines[-1].count(" | ") == 8
