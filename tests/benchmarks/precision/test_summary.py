"""The summary of a run: small enough to be committed, enough for the tables, and a measure for the next run."""

import json

import pytest

from benchmarks.files import RESULTS
from benchmarks.precision import __main__ as precision
from benchmarks.precision.summary import regressions, summarize, write

MEASURED = {
    "half_forward": 0.9999999,
    "half_backward": 1.0,
    "full_matmuls": ["a/file.py:1 (scope): 8388608"] * 100,
    "residual_bytes": {"bfloat16": 2**20, "float32": 24},
    "copied_bytes": 0,
    "largest_residuals": ["1048576 bfloat16[1024, 512] dot_general"] * 30,
    "casts": 87,
    "shared_casts": None,
    "gradient_error": 0.0102730785,
    "temp_bytes": None,
    "step_seconds": None,
    "trace_seconds": 0.54453318999,
    "error": None,
}
EVERYTHING = {
    "device": "cpu",
    "models": {"linen/lm": {"jamp": MEASURED}},
    "depths": {"linen/lm": {12: {"jamp": 1 / 3}}},
}


def test_numbers_are_kept_and_lists_of_operations_are_not():
    summary = summarize(EVERYTHING)
    assert summary["models"]["linen/lm"]["jamp"] == {
        "half_forward": 0.9999999,  # Not rounded: such a model is not wholly in half.
        "half_backward": 1.0,
        "kept_bytes": 2**20 + 24,
        "copied_bytes": 0,
        "casts": 87,
        "gradient_error": 0.0102731,
        "trace_seconds": 0.544533,
    }
    assert (summary["device"], summary["depths"]) == ("cpu", {"linen/lm": {12: {"jamp": 0.333333}}})


def test_of_a_failure_the_error_is_kept():
    failed = dict.fromkeys(MEASURED) | {"error": "TypeError: carry"}
    assert summarize({"models": {"m": {"jamp": failed}}, "depths": {}})["models"]["m"]["jamp"] == {
        "error": "TypeError: carry"
    }


def test_a_line_for_each_model_and_candidate(tmp_path):
    write(tmp_path / "stored.json", summarize(EVERYTHING))
    text = (tmp_path / "stored.json").read_text()
    # Keys of JSON are strings, numbers of blocks too.
    assert json.loads(text) == json.loads(json.dumps(summarize(EVERYTHING)))
    assert [line.split(":")[0].strip() for line in text.splitlines()[3:5]] == ['"linen/lm"', '"jamp"']


@pytest.mark.parametrize(
    ("key", "worse", "no_worse"),
    [("half_backward", 0.99, 1.0), ("kept_bytes", 101, 99), ("gradient_error", 0.0102, 0.01005)],
)
def test_what_is_worse_than_stored_is_named(key, worse, no_worse):
    stored = {"half_backward": 1.0, "kept_bytes": 100, "gradient_error": 0.01, "casts": 3}

    def against_stored(now):
        return list(regressions({"models": {"m": {"jamp": now}}}, {"models": {"m": {"jamp": stored}}}))

    assert against_stored({**stored, "casts": 99, key: no_worse}) == []
    assert against_stored({**stored, key: worse}) == [f"m: {key} {worse:g}, stored {stored[key]:g}"]
    assert against_stored({"error": "TypeError: carry"}) == ["m fails: TypeError: carry"]
    assert list(regressions({"models": {"new": {"jamp": stored}}}, {"models": {}})) == []


def test_what_is_committed_is_a_summary():
    sizes = {path.name: path.stat().st_size for path in RESULTS.glob("*.json")}
    assert "precision.json" in sizes and max(sizes.values()) < 64_000, sizes


@pytest.mark.nightly  # It measures a model twice.
def test_the_command_measures_and_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "")  # Which it adds to.
    everything, stored = tmp_path / "everything.json", tmp_path / "stored.json"
    arguments = ["--models", "equinox/mlp", "--only", "jamp", "--static", "--rounds", "0", "--strict"]
    assert precision.main([*arguments, "--json", str(everything)]) == 0
    summary = summarize(json.loads(everything.read_text()))
    assert list(summary["models"]["equinox/mlp"]) == ["float32", "jamp"]

    write(stored, summary)
    assert precision.main([*arguments, "--against", str(stored)]) == 0
    assert "Nowhere worse" in capsys.readouterr().out
    summary["models"]["equinox/mlp"]["jamp"]["kept_bytes"] -= 1
    write(stored, summary)
    assert precision.main([*arguments, "--against", str(stored)]) == 1
    assert "equinox/mlp: kept_bytes" in capsys.readouterr().out
