"""The commands that continuous integration runs and the pages name: they exist, and GitHub runs those of `.ci/run`."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
CODE = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "Makefile"]
CI, WORKFLOW = ROOT / ".ci" / "run", ROOT / ".github" / "workflows" / "ci.yml"


def test_github_runs_what_ci_run_runs():
    assert re.findall(r"run: (.+)", WORKFLOW.read_text()) == [".ci/run", "make --keep-going nightly"]
    run = " ".join(re.findall(r"^[^#\n]*make (.+)", CI.read_text(), re.MULTILINE)).split()
    assert {"lint", "types", "docs", "test", "test-newest", "bench-quick", "wheel"} <= set(run)


def test_every_make_target_that_is_named_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (*PAGES, CI):
        named = re.findall(r"^make ((?:[a-z-]+ ?)+)|`make ([a-z-]+)", path.read_text(), re.MULTILINE)
        named = {target for words in named for target in " ".join(words).split()}
        assert named <= targets, f"{path.name}: {named - targets}"


def test_every_benchmark_that_is_named_is_there():
    named = {
        (path.name, module)
        for path in (*PAGES, *CODE)
        for module in re.findall(r"python -m (benchmarks[a-z0-9_.]*[a-z0-9_])", path.read_text())
    }
    assert len(named) > 10
    # A folder is a command where it has a `__main__`.
    missing = [(page, module) for page, module in named if not importlib.util.find_spec(module)]
    assert missing == []
    folders = {module for _, module in named if (ROOT / module.replace(".", "/")).is_dir()}
    assert [module for module in folders if not importlib.util.find_spec(f"{module}.__main__")] == []


def test_benchmark_files_that_are_named_are_there():
    for path in PAGES:
        files = re.findall(r"benchmarks/[a-z0-9_/-]+\.(?:py|json)", path.read_text())
        assert [file for file in files if not (ROOT / file).exists()] == [], path.name
