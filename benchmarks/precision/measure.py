"""All candidates on one model, and the trace times of deep ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from benchmarks.candidates import Candidate
from benchmarks.models import Model, objective
from benchmarks.precision import instruments
from benchmarks.precision.goals import Row
from benchmarks.precision.instruments import Measurement
from benchmarks.timing import step_seconds
from benchmarks.zoo import Entry, plain

DEPTHS = (12, 48, 96)


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        policy: What jamp is given.
        static: Whether to trace alone: nothing is compiled or run.
        steps: Timed steps of each compiled gradient.
        rounds: Rounds of trace timing.
        draws: Draws that the gradient error is averaged over.
    """

    policy: str = "O2:bfloat16"
    static: bool = False
    steps: int = 0
    rounds: int = 5
    draws: int = 3


@dataclass
class _Runs:
    """What the candidates of one model share: the draws, float32's gradients on them, and the compiled gradients."""

    draws: Sequence[Any]
    references: list[Any] = field(default_factory=list)
    programs: dict[str, Any] = field(default_factory=dict)


def measure_entry(entry: Entry, found: list[Candidate], settings: Settings) -> Row:
    """Returns what was measured of all candidates; what fails leaves its error in place of the numbers."""
    try:
        models = built(entry, found)
    except Exception as error:
        return {"float32": Measurement(error=_message(error))}
    full = models[None]
    found = [candidate for candidate in found if candidate.dtype in models]
    results = {candidate.name: Measurement() for candidate in found}

    first = (full.params, *full.inputs)
    runs = _Runs([first, *(instruments.perturbed(first, seed) for seed in range(1, settings.draws))])
    for candidate in found:
        model, result = models[candidate.dtype], results[candidate.name]
        apply = candidate.wrap(model.apply)
        _guarded(result, instruments.measure_static, result, model, apply)
        if candidate.name == "jamp":
            _guarded(result, instruments.measure_shared_casts, result, model, settings.policy)
        if candidate.runs and not settings.static and not result.error:
            _guarded(result, _run, candidate.name, result, objective(model, apply), runs)
    if settings.steps:
        for name, seconds in step_seconds(runs.programs, first, settings.steps).items():
            results[name].step_seconds = seconds
    if settings.rounds:
        _time_traces(results, found, models, settings.rounds)
    return results


def built(entry: Entry, found: list[Candidate]) -> dict[Any, Model]:
    """The model by the dtype that candidates build it with; all with the same float32 parameters and inputs."""
    full = entry.build(None)
    dtypes = {candidate.dtype for candidate in found if candidate.dtype is not None} if entry.native else set()
    native = {dtype: replace(entry.build(dtype), params=full.params, inputs=full.inputs) for dtype in dtypes}
    return {None: full, **native}


def _run(name: str, result: Measurement, loss: Callable[..., jax.Array], runs: _Runs) -> None:
    """Compiles and runs one candidate; the first one that comes here, float32, sets the references."""
    compiled = instruments.run_gradient(loss, runs.draws)
    result.temp_bytes, runs.programs[name] = compiled.temp_bytes, compiled.program
    if not runs.references:
        runs.references.extend(compiled.gradients)
    result.gradient_error = instruments.gradient_error(compiled.gradients, runs.references)


def _time_traces(results: Row, found: list[Candidate], models: dict[Any, Model], rounds: int) -> None:
    makers = {}
    for candidate in found:
        if candidate.runs and results[candidate.name].error is None:
            model = models[candidate.dtype]
            makers[candidate.name] = lambda c=candidate, m=model: objective(m, c.wrap(m.apply))
    for name, seconds in instruments.trace_seconds(makers, models[None], rounds).items():
        results[name].trace_seconds = seconds
    for name, seconds in instruments.trace_seconds(makers, models[None], rounds, later=True).items():
        results[name].later_trace_seconds = seconds


def _guarded(result: Measurement, measure_part: Callable[..., None], *args: Any) -> None:
    try:
        measure_part(*args)
    except Exception as error:  # a model that fails is a result, and the others are still to be measured
        result.error = _message(error)


def _message(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def measure_depths(found: list[Candidate], rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    """Trace times of unrolled transformers by depth, to see that they grow linearly."""
    builders: dict[str, Callable[[Any, int], Model]] = {"plain/transformer": plain.transformer_deep}
    try:
        from benchmarks.zoo import flax_linen
    except ImportError:
        pass
    else:
        builders["linen/lm"] = flax_linen.lm_deep
    times: dict[str, dict[int, dict[str, float]]] = {}
    for name, build in builders.items():
        for depth in DEPTHS:
            models = {dtype: build(dtype, depth) for dtype in dict.fromkeys(c.dtype for c in found)}
            results = {candidate.name: Measurement() for candidate in found}
            _time_traces(results, found, models, max(rounds, 3))
            seconds = {key: result.trace_seconds for key, result in results.items() if result.trace_seconds}
            times.setdefault(name, {})[depth] = seconds
    return times
