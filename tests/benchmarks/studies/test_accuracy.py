"""The accuracy table: differences are from float32's run of the same seed."""

from benchmarks.studies.accuracy import summarize


def test_differences_are_paired_by_seed():
    full, half = summarize({"task": {"O0": [1.0, 3.0], "O2:float16": [1.5, 3.5]}})
    assert (full["mean"], full["difference"], full["deviation"]) == (2.0, 0.0, 0.0)
    assert (half["mean"], half["difference"], half["deviation"]) == (2.5, 0.5, 0.0)
    assert half["values"] == [1.5, 3.5]


def test_one_seed_has_no_deviation():
    assert summarize({"task": {"O0": [1.0]}})[0]["deviation"] == 0
