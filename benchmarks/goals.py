"""What a GPU's step times and memory are to reach, and whether they did."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# What Paddle's and MXNet's tutorials report as speed-ups over float32, and what jamp is to reach.
PUBLISHED = {
    ("SimpleNet", "jamp O2 float16"): 3.31,
    ("SimpleNet", "jamp O1 float16"): 2.26,
    ("ResNet-50", "jamp O2 float16"): 1.82,
    ("LSTM", "jamp O2 float16"): 3.0,
}
OURS, BY_HAND, TORCH = "jamp O2 bfloat16", "hand-written bfloat16", "torch.autocast bfloat16"


@dataclass(frozen=True)
class Goal:
    """One comparison.

    Attributes:
        workload: The workload.
        what: What is compared with what.
        value: What was measured.
        bound: What it has to reach.
        at_most: Whether the bound is an upper one.
    """

    workload: str
    what: str
    value: float
    bound: float
    at_most: bool = False

    @property
    def passed(self) -> bool:
        """Whether the bound is kept."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{self.workload}: {self.what} {self.value:.2f} (goal {sign} {self.bound:.2f})"


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Returns the goals that the rows of a suite can tell about."""
    found = {(row["workload"], row["candidate"]): row for row in rows if "speed" in row}
    return [goal for name in dict.fromkeys(workload for workload, _ in found) for goal in _of_workload(name, found)]


def _of_workload(name: str, found: dict[tuple[str, str], dict[str, Any]]) -> Iterator[Goal]:
    for (workload, candidate), speed in PUBLISHED.items():
        if workload == name and (row := found.get((name, candidate))):
            yield Goal(name, f"{candidate}, times float32", row["speed"], speed)
    ours, by_hand, torch, full = (found.get((name, candidate)) for candidate in (OURS, BY_HAND, TORCH, "float32"))
    if ours and by_hand:
        yield Goal(name, "time of the hand-written step", ours["seconds"] / by_hand["seconds"], 1.0, at_most=True)
        if ours["peak_bytes"] and by_hand["peak_bytes"]:
            share = ours["peak_bytes"] / by_hand["peak_bytes"]
            yield Goal(name, "memory of the hand-written step", share, 1.0, at_most=True)
    if ours and torch:
        yield Goal(name, "time of PyTorch's step", ours["seconds"] / torch["seconds"], 1.0, at_most=True)
    if ours and full and ours["largest_batch"] and full["largest_batch"]:
        yield Goal(name, "largest batch, times float32's", ours["largest_batch"] / full["largest_batch"], 2.0)
    if name == "SimpleNet" and ours and ours["peak_share"]:
        yield Goal(name, "share of the matmul peak", ours["peak_share"], 0.7)
