"""The table of optimizer states on the page about training."""

import json

from benchmarks.files import RESULTS, ROOT
from benchmarks.render import insert
from benchmarks.studies.render import optimizer_states


def run(state, seed, loss, **settings):
    shared = {"task": "gpt", "state": state, "seed": seed, "steps": 2000, "schedule": "cosine", "jax": "0.10.2"}
    return shared | {"held-out loss": loss} | settings


def rows(runs):
    lines = optimizer_states({"runs": runs}).splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_differences_are_from_float32_of_the_same_seed():
    runs = [run("float32", 0, 1.0), run("float32", 1, 2.0), run("int8", 0, 1.25), run("int8", 1, 1.5)]
    runs += [run("float8", 1, 2.0)]
    assert rows(runs) == [
        ["gpt, 2,000 steps", "seed 0", "1.0000", "", "+25.00 %", "", "", "", ""],
        ["gpt, 2,000 steps", "seed 1", "2.0000", "", "-25.00 %", "", "+0.00 %", "", ""],
        ["gpt, 2,000 steps", "mean", "1.5000", "", "+0.00 %", "", "", "", ""],
    ]


def test_runs_of_other_settings_are_not_mixed():
    runs = [run("float32", 0, 1.0), run("int8", 0, 1.25), run("float32", 0, 4.0, jax="0.12.0")]
    runs += [run("float32", 0, 2.0, steps=10_000, schedule="constant")]
    assert [row[:3] + row[4:5] for row in rows(runs)] == [
        ["gpt, 2,000 steps", "seed 0", "1.0000", "+25.00 %"],
        ["gpt, 10,000 steps, constant rate", "seed 0", "2.0000", ""],
    ]


def test_the_page_has_the_stored_runs():
    page = (ROOT / "docs" / "training.md").read_text()
    stored = json.loads((RESULTS / "optimizer_states.json").read_text())
    assert insert(page, "optimizer-states-table", optimizer_states(stored)) == page
