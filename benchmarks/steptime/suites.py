"""The suites of `benchmarks.steptime`: which candidates, how they are timed, and what is kept of it."""

import gc
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

from benchmarks.candidates import Candidate
from benchmarks.commands import check_names
from benchmarks.steptime.candidates import LARGEST, TUTORIALS, candidates
from benchmarks.steptime.goals import BY_HAND, TORCH
from benchmarks.steptime.programs import Program, largest_batch, program
from benchmarks.steptime.workloads import Workload, scanned_gpt, workloads
from benchmarks.timing import clock

Row = dict[str, Any]
DTYPES = ("bfloat16", "float16", "float32")  # In this order: the name of the first ends in that of the second.
OVERHEAD = ("trace_seconds", "compile_seconds")
WARM_UP = 10  # Turns, in which a loss scale settles too.
TURN_SECONDS = 0.1  # Of several steps on an accelerator: waiting for each would count what it takes to start one.


def choose(full: bool, names: Sequence[str] | None, error: Callable[[str], Any]) -> list[Workload]:
    """Returns the workloads of these names, all of them for None."""
    found = {workload.name: workload for workload in (*workloads(full), *([scanned_gpt()] if full else []))}
    check_names("workload", names or (), found, error)
    return [found[name] for name in names or found]


def step_times(
    suite: str, workload: Workload, full: bool, rounds: int, largest: bool, names: Sequence[str] | None = None
) -> list[Row]:
    """Times the suite's candidates on a workload, in turn, and PyTorch's among the peers.

    Args:
        suite: "tutorials" or "peers".
        workload: The workload.
        full: Whether at the published sizes.
        rounds: Timed steps of each candidate.
        largest: Whether to look for the largest batches too, which compiles many times.
        names: The candidates, None for all of the suite.

    Returns:
        A row for each candidate.
    """
    found, missing = candidates()
    if suite == "tutorials":
        found, missing = [candidate for candidate in found if candidate.name in TUTORIALS], {}
    if names is not None:
        found, missing = [candidate for candidate in found if candidate.name in names], {}
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    peaks = {dtype: matmul_peak(dtype) for dtype in DTYPES} if full else {}
    programs: dict[str, Any] = _compiled(workload, found)
    if suite == "peers" and (names is None or TORCH in names):
        programs |= _torch_programs(workload, full)
    take_turns(programs, rounds, workload)
    rows = [_row(workload, name, done, programs.get("float32"), peaks) for name, done in programs.items()]
    programs.clear()
    gc.collect()
    if largest and (limit := _memory_limit()) is not None:
        _add_largest_batches(rows, workload, found, limit)
    return rows


def take_turns(programs: dict[str, Any], rounds: int, workload: Workload) -> None:
    """Runs each program in turn, so that whatever else the machine is doing hits all of them alike.

    A program that does not fit into memory, does not stay finite, or skips steps while it is timed, is left out.
    """
    steps = dict.fromkeys(programs, 1)
    skipped: dict[str, int] = {}
    for turn in range(WARM_UP + rounds):
        _progress(f"{workload.name}: round {turn + 1} of {WARM_UP + rounds}")
        for name, done in list(programs.items()):
            if turn == WARM_UP and isinstance(done, Program):
                skipped[name] = done.skipped()
            try:
                start = clock()
                done.run(steps[name])
                seconds = (clock() - start) / steps[name]
            except Exception as error:  # JAX and PyTorch say in different ways that memory is out.
                _left_out(name, workload, error)
                del programs[name]
                continue
            if turn >= WARM_UP:
                done.seconds.append(seconds)
            elif turn and jax.default_backend() != "cpu":
                steps[name] = min(max(int(TURN_SECONDS / seconds), 1), 50)
    for name, done in list(programs.items()):
        lost = done.skipped() - skipped[name] if isinstance(done, Program) else 0
        if lost or not done.healthy():
            _left_out(name, workload, f"{lost} timed steps were skipped" if lost else "its parameters are not finite")
            del programs[name]
    _progress("")


def _compiled(workload: Workload, found: Sequence[Candidate]) -> dict[str, Any]:
    """Compiles the candidates; several at once for an accelerator, whose compiler leaves most of the processor idle."""
    with ThreadPoolExecutor(1 if jax.default_backend() == "cpu" else 8) as pool:
        waiting = {candidate.name: pool.submit(program, workload, candidate) for candidate in found}
        programs = {}
        for name, future in waiting.items():
            _progress(f"{workload.name}: compiling {name}")
            try:
                programs[name] = future.result()
            except jax.errors.JaxRuntimeError as error:
                _left_out(name, workload, error)
    return programs


def _left_out(name: str, workload: Workload, reason: Any) -> None:
    print(f"{name} is left out of {workload.name}: {reason}", file=sys.stderr)


def matmul_peak(dtype: str) -> float:
    """FLOP/s of a chain of large square products: what a GPU reaches in this dtype, in float32 with TF32."""
    size, chain = 8192, 8
    x = (jax.random.normal(jax.random.key(0), (size, size)) / size**0.5).astype(dtype)

    @jax.jit
    def products(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(chain):
            y = x @ y
        return y

    products(x).block_until_ready()
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        products(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return chain * 2 * size**3 / min(seconds)


def overhead(workload: Workload, rounds: int) -> list[Row]:
    """Measures the seconds to trace and to compile a step, by hand and through jamp, in turn."""
    names = ("float32", BY_HAND, "jamp O1 bfloat16", "jamp O2 bfloat16", "jamp O2 float16")
    found = [candidate for candidate in candidates()[0] if candidate.name in names]
    tries: dict[str, list[Row]] = {candidate.name: [] for candidate in found}
    for turn in range(max(rounds // 4, 2)):
        for candidate in found:
            _progress(f"{workload.name}: {candidate.name}, turn {turn + 1}")
            done = program(workload, candidate)
            tries[candidate.name].append({key: getattr(done, key) for key in OVERHEAD})
            jax.clear_caches()
    rows = []
    for name, times in tries.items():
        rows.append({"workload": workload.name, "sizes": workload.sizes, "candidate": name})
        # The first turn also traces the libraries' own functions, and starts the compiler's threads.
        rows[-1] |= {key: statistics.median(one[key] for one in times[1:]) for key in OVERHEAD}
    _progress("")
    return rows


def environment(full: bool) -> dict[str, Any]:
    """Returns what the results depend on: the device and the versions."""
    names = ("jax", "jaxlib", "flax", "optax", "numpy", "jmp", "mixed-precision-for-JAX", "torch", "jamp-jax")
    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else f"{_processor()}, {os.cpu_count()} cores"
    versions = {name: version for name in names if (version := _version(name))}
    return {
        "device": kind,
        "platform": device.platform,
        "sizes": "full" if full else "small",
        "python": platform.python_version(),
        "versions": versions,
    }


def _row(workload: Workload, name: str, done: Any, reference: Program | None, peaks: dict[str, float]) -> Row:
    seconds = statistics.median(done.seconds)
    dtype = next((dtype for dtype in DTYPES if dtype in name), "float32")
    return {
        "workload": workload.name,
        "sizes": workload.sizes,
        "candidate": name,
        "seconds": seconds,
        "quartiles": statistics.quantiles(done.seconds, n=4)[::2] if len(done.seconds) > 1 else None,
        "speed": statistics.median(reference.seconds) / seconds if reference else None,
        "examples_per_second": workload.batch / seconds,
        "peak_bytes": done.peak_bytes,
        "peak_share": reference.flops / seconds / peaks[dtype] if peaks and reference else None,
        "largest_batch": None,
    }


def _torch_programs(workload: Workload, full: bool) -> dict[str, Any]:
    if jax.default_backend() != "gpu":
        return {}
    try:
        import torch

        from benchmarks.steptime.torch_programs import torch_program
    except ImportError as error:
        print(f"torch is left out: {error}", file=sys.stderr)
        return {}
    if not torch.cuda.is_available():
        print("torch is left out: it sees no GPU", file=sys.stderr)
        return {}
    _progress(f"{workload.name}: compiling {TORCH}")
    try:
        return {TORCH: torch_program(workload, "bfloat16", full, "cuda")}
    except Exception as error:  # A compiler that is not there, memory that JAX has taken: it says many things.
        _left_out(TORCH, workload, error)
        return {}


def _add_largest_batches(rows: list[Row], workload: Workload, found: list[Candidate], limit: int) -> None:
    for row in rows:
        if row["candidate"] in LARGEST:
            _progress(f"{workload.name}: largest batch of {row['candidate']}")
            candidate = next(candidate for candidate in found if candidate.name == row["candidate"])
            row["largest_batch"] = largest_batch(partial(fits, workload, candidate, limit), workload.batch)
            gc.collect()


def fits(workload: Workload, candidate: Candidate, limit: int, batch: int) -> bool:
    """Returns whether a train step with `batch` examples needs at most `limit` bytes."""
    try:
        return program(workload, candidate, batch).peak_bytes <= limit
    except jax.errors.JaxRuntimeError:  # The compiler or the batch itself ran out of memory.
        return False


def _memory_limit() -> int | None:
    """Bytes that JAX may use of the device; None where it does not say, as on CPU."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def _processor() -> str:
    """The processor's name, for which Python has no function that works on Linux."""
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
