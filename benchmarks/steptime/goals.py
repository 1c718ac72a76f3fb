"""What a GPU's step times and memory are held against."""

from collections.abc import Iterator
from typing import Any

from benchmarks.goals import Goal

# What Paddle's and MXNet's tutorials report as speed-ups over float32, and what jamp is to reach.
PUBLISHED = {
    ("SimpleNet", "jamp O2 float16"): 3.31,
    ("SimpleNet", "jamp O1 float16"): 2.26,
    ("ResNet-50", "jamp O2 float16"): 1.82,
    ("LSTM", "jamp O2 float16"): 3.0,
}
OURS, BY_HAND, TORCH = "jamp O2 bfloat16", "hand-written bfloat16", "torch.autocast bfloat16"
FUSED = f"{OURS}, attention=fused"  # As PyTorch's program calls one kernel for an attention.


def step_time_goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Returns the goals that the rows of a suite can tell about."""
    found = {(row["workload"], row["candidate"]): row for row in rows if row.get("seconds")}
    return [goal for name in dict.fromkeys(workload for workload, _ in found) for goal in _of_workload(name, found)]


def _of_workload(name: str, found: dict[tuple[str, str], dict[str, Any]]) -> Iterator[Goal]:
    for (workload, candidate), speed in PUBLISHED.items():
        if workload == name and (row := found.get((name, candidate))) and row["speed"]:
            yield Goal(f"{name}: {candidate}, times float32", row["speed"], speed, at_most=False)
    ours, by_hand, torch, full = (found.get((name, candidate)) for candidate in (OURS, BY_HAND, TORCH, "float32"))
    if ours and by_hand:
        yield Goal(f"{name}: time of the hand-written step", ours["seconds"] / by_hand["seconds"], 1.0)
        if ours["peak_bytes"] and by_hand["peak_bytes"]:
            share = ours["peak_bytes"] / by_hand["peak_bytes"]
            yield Goal(f"{name}: memory of the hand-written step", share, 1.0)
    fused = found.get((name, FUSED))
    if (like := fused or ours) and torch:
        how = ", attention=fused" if fused else ""
        yield Goal(f"{name}: time of PyTorch's step{how}", like["seconds"] / torch["seconds"], 1.0)
        if like["peak_bytes"] and torch["peak_bytes"]:
            share = like["peak_bytes"] / torch["peak_bytes"]
            yield Goal(f"{name}: memory of PyTorch's step{how}", share, 1.0)
    if ours and full and ours["largest_batch"] and full["largest_batch"]:
        times = ours["largest_batch"] / full["largest_batch"]
        yield Goal(f"{name}: largest batch, times float32's", times, 2.0, at_most=False)
    if name == "SimpleNet" and ours and ours["peak_share"]:
        yield Goal(f"{name}: share of the matmul peak", ours["peak_share"], 0.7, at_most=False)
