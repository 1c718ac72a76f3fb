"""Time and memory of compiled programs."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax


def clock() -> float:
    """Seconds: of the wall on an accelerator; on a CPU, which others share, those in which this process was busy."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


def step_seconds(programs: dict[str, Callable[..., Any]], draw: Sequence[Any], rounds: int) -> dict[str, float]:
    """Median seconds of each program on one draw, the programs in turn."""
    draw = jax.device_put(draw)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = clock()
            jax.block_until_ready(program(*draw))
            seconds[name].append(clock() - start)
    return {name: median(times) for name, times in seconds.items()}


def peak_bytes(compiled: Any) -> int:
    """Bytes that a compiled step needs, as the compiler plans them: arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    used = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return used - memory.alias_size_in_bytes
