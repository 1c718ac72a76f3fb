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


def milliseconds(program: Any, operands: Sequence[Any]) -> float:
    """Of a call, the median of five times as many as take about 50 ms: an accelerator is not waited for in between."""
    jax.block_until_ready(program(*operands))
    start = time.perf_counter()
    jax.block_until_ready(program(*operands))
    calls = max(3, min(200, int(0.05 / (time.perf_counter() - start))))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            out = program(*operands)
        jax.block_until_ready(out)
        times.append(1e3 * (time.perf_counter() - start) / calls)
    return median(times)


def peak_bytes(compiled: Any) -> int:
    """Bytes that a compiled step needs, as the compiler plans them: arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    used = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return used - memory.alias_size_in_bytes
