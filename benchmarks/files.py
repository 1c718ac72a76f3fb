"""Where results lie: summaries in `benchmarks/results`, and in `out`, which git ignores, all that was measured."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OUT = ROOT / "out"


def write_json(path: Path, stored: dict[str, Any]) -> None:
    """Writes JSON with an indent, so that versions can be compared, and makes the folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored, indent=1) + "\n")
