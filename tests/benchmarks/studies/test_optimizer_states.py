"""The file of the study of optimizer states: runs of other settings lie side by side, and no run is made twice."""

import pytest

pytest.importorskip("flax")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from benchmarks.studies import optimizer_states


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Runs the study, and returns what is stored and which runs were made; the losses are made up."""
    made = []

    def train(task, state, args, seed, steps, decay):
        made.append((task, state, seed, steps))
        loss = 1.0 + seed + (state == "int8") / 2 + steps / 1024
        return {"mean loss": loss, "held-out loss": loss, "first step not finite": None}

    monkeypatch.setattr(optimizer_states, "train", train)
    monkeypatch.setattr(optimizer_states, "code_errors", lambda args: [{"code": "linear", "error": args.batch}])

    def run(*arguments):
        made.clear()
        shared = ["--seeds", "2", "--steps", "4", "--out", str(tmp_path / "states.json"), "--states", "float32", "int8"]
        return optimizer_states.main([*shared, *arguments]), list(made)

    return run


@pytest.mark.nightly
def test_other_settings_discard_nothing(study):
    first, made = study("--tasks", "lstm", "--long", "8")
    assert len(made) == len(first["runs"]) == 6
    stored = first
    for other in (["--long", "16"], ["--steps", "2"], ["--batch", "8"], ["--size", "16"], ["--tasks", "digits"]):
        before = stored
        stored, made = study("--tasks", "lstm", "--long", "8", *other)
        assert made and stored["runs"][: len(before["runs"])] == before["runs"], other
        assert len(stored["runs"]) == len(before["runs"]) + len(made), other
        assert all(row in stored["codes"] for row in before["codes"]), other


@pytest.mark.nightly  # It trains.
def test_a_stored_run_is_left_out(study):
    stored, _ = study("--tasks", "gpt", "--long", "8")
    assert study("--tasks", "gpt", "--long", "8") == (stored, [])
    _, made = study("--tasks", "gpt", "--long", "16")
    assert made == [("gpt", "float32", 0, 16), ("gpt", "int8", 0, 16)]
    # The digits have neither a width nor a batch size that could be chosen.
    study("--tasks", "digits", "--long", "0")
    assert study("--tasks", "digits", "--long", "0", "--batch", "8", "--size", "16")[1] == []


def test_runs_that_another_process_stored_are_kept(study, monkeypatch):
    train = optimizer_states.train

    def train_beside_another(task, *arguments):
        if task == "gpt":
            monkeypatch.setattr(optimizer_states, "train", train)
            study("--tasks", "lstm", "--long", "0")
        return train(task, *arguments)

    monkeypatch.setattr(optimizer_states, "train", train_beside_another)
    stored, _ = study("--tasks", "gpt", "--long", "0")
    assert sorted(run["task"] for run in stored["runs"]) == ["gpt"] * 4 + ["lstm"] * 4


def test_differences_are_from_float32_at_the_same_settings(study):
    study("--tasks", "digits", "--long", "0")
    stored, _ = study("--tasks", "digits", "--long", "1024")
    rows = [row for row in stored["summary"] if (row["measure"], row["state"]) == ("held-out loss", "int8")]
    short, long = rows
    assert (short["schedule"], short["steps"], short["seeds"]) == ("cosine", 4, 2)
    assert short["mean"] == 2 + 4 / 1024
    assert (long["schedule"], long["steps"], long["seeds"]) == ("constant", 1024, 1)
    assert (long["difference in percent"], long["deviation in percent"]) == (25.0, None)
