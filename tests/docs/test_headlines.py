"""The figures in front of the documentation are those of the results that are stored."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.precision.render import by_library

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "benchmarks/results/precision.json").read_text())


def means():
    """The last row of the README's table, over all models, by the headings."""
    lines = by_library(STORED).strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], lines[-1])]
    return dict(zip(*cells, strict=True))


@pytest.mark.parametrize(
    ("page", "pattern", "figure"),
    [
        ("README.md", r"In (\d+) of 36 unmodified models", "jamp"),
        ("README.md", r"parameters by hand reaches (\d+)\.", "wholly in half: jmp"),
        ("README.md", r"keep (\S+) of float32's memory", "memory kept, of float32"),
        ("README.md", r": (\S+) of what hand-written mixed precision keeps", "of native"),
        ("README.md", r"\((\S+) of its error\)", "gradient error, of native"),
        ("docs/index.md", r"\*\*(\d+) of 36\*\* unmodified", "jamp"),
        ("docs/index.md", r"\*\*(\S+)\*\* of float32's memory", "memory kept, of float32"),
        ("docs/index.md", r"; (\S+) of what hand-written mixed precision keeps", "of native"),
        ("docs/index.md", r"\*\*(\S+)\*\* of the gradient error", "gradient error, of native"),
        ("docs/levels.md", r"O2 in bfloat16 keeps (\S+) of float32's memory", "memory kept, of float32"),
    ],
)
def test_a_figure_is_that_of_the_results(page, pattern, figure):
    assert re.findall(pattern, (ROOT / page).read_text()) == [means()[figure]]
