"""The step-time benchmark: it runs, stores, and what it stores is what the README shows."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import render
from benchmarks.goals import print_goals
from benchmarks.steptime import __main__ as steptime
from benchmarks.steptime import programs, suites
from benchmarks.steptime.candidates import candidates
from benchmarks.steptime.goals import BY_HAND, OURS, step_time_goals
from benchmarks.steptime.render import chart, speeds
from benchmarks.steptime.workloads import workloads

SIMPLE_NET = workloads(full=False)[0]


@pytest.fixture
def few_candidates(monkeypatch):
    """Only the candidates that a test needs, because each is compiled."""
    wanted = ("float32", "hand-written bfloat16", "jamp O2 float16")
    found = [candidate for candidate in candidates()[0] if candidate.name in wanted]
    monkeypatch.setattr(suites, "candidates", lambda: (found, {}))


@pytest.mark.nightly  # It trains.
@pytest.mark.usefixtures("few_candidates")
def test_peers_are_timed_stored_and_rendered(tmp_path, capsys):
    steptime.main(["peers", "--workload", "SimpleNet", "--rounds", "2", "--out", str(tmp_path / "results")])
    (path,) = (tmp_path / "results").glob("*.json")
    rows = json.loads(path.read_text())["suites"]["peers"]["rows"]
    assert [row["candidate"] for row in rows] == ["float32", "hand-written bfloat16", "jamp O2 float16"]
    assert rows[0]["speed"] == 1 and all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert "Goals for a GPU" in printed and ">= 3.31" in printed and "FAIL" not in printed

    (tmp_path / "docs" / "images").mkdir(parents=True)
    (tmp_path / "README.md").write_text("before\n<!-- benchmark-table -->\nold\n<!-- /benchmark-table -->\nafter\n")
    render.main(["--results", str(tmp_path / "results"), "--root", str(tmp_path)])
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n") and "old" not in readme
    assert "SimpleNet" in readme and f"1.00, {rows[0]['peak_bytes'] / 1e6:.1f} MB" in readme
    assert "TF32" not in readme and "hand-written bfloat16" in readme  # What was measured, and nothing else.
    assert "jamp O2 float16" in (tmp_path / "docs" / "benchmarks.md").read_text()
    assert (tmp_path / "docs" / "images" / "benchmarks.png").stat().st_size > 1000


def test_a_workload_without_float32_shows_its_milliseconds(tmp_path):
    row = {"workload": "GPT", "sizes": "", "speed": None, "peak_bytes": 2 * 10**9, "largest_batch": None}
    rows = [row | {"candidate": BY_HAND, "seconds": 0.052}, row | {"candidate": OURS, "seconds": 0.044}]
    stored = {"device": "Chip", "suites": {"peers": {"rows": rows, "environment": {"platform": "gpu"}}}}
    assert speeds([stored]).splitlines()[-1] == "| Chip | GPT | 52.0 ms, 2.0 GB | 44.0 ms, 2.0 GB |"
    chart([stored], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000
    assert [goal.value for goal in step_time_goals(rows)] == [0.044 / 0.052, 1.0]


def test_goals_pass_or_fail(capsys):
    def row(candidate, seconds, peak, share=None, batch=None):
        measured = {"seconds": seconds, "speed": 8 / seconds, "peak_bytes": peak, "peak_share": share}
        return {"workload": "SimpleNet", "candidate": candidate, "largest_batch": batch, **measured}

    rows = [row("float32", 8, 4, batch=64), row("hand-written bfloat16", 2, 2), row("jamp O1 float16", 4, 4)]
    rows += [row("jamp O2 bfloat16", 1, 3, 0.75, 128), row("torch.autocast bfloat16", 0.5, 1)]
    print_goals(step_time_goals(rows))
    printed = capsys.readouterr().out.splitlines()
    assert [[cell.strip() for cell in line.split("│")[1:5]] for line in printed if "│" in line] == [
        ["FAIL", "SimpleNet: jamp O1 float16, times float32", "2.00", ">= 2.26"],
        ["PASS", "SimpleNet: time of the hand-written step", "0.50", "<= 1.00"],
        ["FAIL", "SimpleNet: memory of the hand-written step", "1.50", "<= 1.00"],
        ["FAIL", "SimpleNet: time of PyTorch's step", "2.00", "<= 1.00"],
        ["FAIL", "SimpleNet: memory of PyTorch's step", "3.00", "<= 1.00"],
        ["PASS", "SimpleNet: largest batch, times float32's", "2.00", ">= 2.00"],
        ["PASS", "SimpleNet: share of the matmul peak", "0.75", ">= 0.70"],
    ]


def test_storing_replaces_the_same_workload_only(tmp_path):
    environment = {"device": "Chip 9, 2 cores", "platform": "cpu", "versions": {"jax": "1"}}
    for workload, seconds in (("LSTM", 1), ("GPT", 2), ("LSTM", 3)):
        environment["versions"] = {"jax": str(seconds)} | ({"jmp": "2"} if workload == "GPT" else {})
        path = steptime.store(tmp_path, "peers", [{"workload": workload, "seconds": seconds}], environment)
    assert path.name == "chip-9-2-cores.json"
    suite = json.loads(path.read_text())["suites"]["peers"]
    assert suite["rows"] == [{"workload": "LSTM", "seconds": 3}, {"workload": "GPT", "seconds": 2}]
    assert suite["environment"]["versions"] == {"jax": "3", "jmp": "2"}


def test_a_program_trains_and_counts_its_flops():
    candidate = next(candidate for candidate in candidates()[0] if candidate.name == "jamp O2 float16")
    program = programs.program(SIMPLE_NET, candidate)
    before = program.state[0]["params"]["Dense_2"]["bias"].copy()
    program.run()
    assert not jnp.array_equal(program.state[0]["params"]["Dense_2"]["bias"], before)
    # Three products forward, three for the weights, and two for the inputs: the data needs no gradient.
    assert program.flops == 8 * 2 * 64 * 512 * 512


@pytest.mark.parametrize("largest", [0, 1, 63, 64, 65, 448, 1000])
def test_the_largest_batch_is_found_to_an_eighth(largest):
    assert largest * 7 / 8 <= programs.largest_batch(lambda batch: batch <= largest, 64) <= largest


@pytest.mark.nightly  # It compiles train steps.
def test_a_batch_fits_in_what_its_program_needs():
    candidate = candidates()[0][0]
    needed = programs.program(SIMPLE_NET, candidate, 96).peak_bytes
    assert suites.fits(SIMPLE_NET, candidate, needed, 96)
    assert not suites.fits(SIMPLE_NET, candidate, needed, 128)


@pytest.mark.nightly
def test_programs_that_skip_or_leave_the_finite_are_left_out(capsys):
    wanted = ("float32", "jamp O2 bfloat16", "jamp O2 float16")
    found = {c.name: programs.program(SIMPLE_NET, c) for c in candidates()[0] if c.name in wanted}
    found["jamp O2 bfloat16"].state = jax.tree.map(lambda x: x * jnp.nan, found["jamp O2 bfloat16"].state)
    found["jamp O2 float16"].inputs = tuple(x * 1e30 for x in found["jamp O2 float16"].inputs)
    suites.take_turns(found, 2, SIMPLE_NET)
    assert list(found) == ["float32"]
    told = capsys.readouterr().err
    assert "bfloat16 is left out of SimpleNet: its parameters are not finite" in told
    assert "float16 is left out of SimpleNet: 2 timed steps were skipped" in told


def test_an_unknown_workload_names_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        steptime.main(["peers", "--workload", "BERT"])
    assert "SimpleNet, ResNet-50, LSTM, GPT" in capsys.readouterr().err
