"""What each rounding of a program does to its results: its error times the derivative of the results.

The method is that of Menon et al., "ADAPT: Algorithmic Differentiation Applied to Floating-Point Precision Tuning" (SC
2018). Each rounding goes through a function that changes nothing and whose derivative, in reverse mode, is not that of
its operand but two sums of it times the error: as it is, and squared. So one backward pass gives the sums of all
roundings, and nothing of their size is kept for that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp._compat import inner_jaxprs, open_jaxpr
from jamp._dtypes import is_half
from jamp.inspect.roundings.maps import along
from jamp.inspect.roundings.pair import Pair
from jamp.inspect.roundings.pieces import EvaluationInPieces
from jamp.inspect.roundings.program import Program
from jamp.inspect.roundings.raised import Evaluation
from jamp.inspect.roundings.sites import Rounding, roundings
from jamp.inspect.roundings.steps import Key


class Measured(NamedTuple):
    """What roundings do to the floating results and to the gradient of a program, relative to their l2 norms.

    Attributes:
        sites: The roundings.
        signed: For each target (results, gradient) and rounding, what it moves the target by, along the error that
            was measured.
        spread: The same as if the errors of its elements were independent of each other: the length of what it moves.
        iterations: As `signed`, for each iteration of the outermost loop around it.
        errors: For each target, the error that was measured: infinite where float32 is finite and half is not, NaN
            where no number of an array is finite in float32.
    """

    sites: list[Rounding]
    signed: list[np.ndarray]
    spread: list[np.ndarray]
    iterations: list[dict[Key, np.ndarray]]
    errors: list[float]


@jax.custom_vjp
def _tap(slot: Any, value: Any, error: Any) -> Any:
    del slot, error
    return value


def _tap_backward(error: Any, cotangent: Any) -> Any:
    # What nothing depends on has no effect, even if it is infinite; nor has what is exact, beside a NaN of float32's.
    effect = jnp.where((cotangent == 0) | (error == 0), 0.0, cotangent * error)
    return jnp.stack([effect.sum(), (effect * effect).sum()]), cotangent, jnp.zeros_like(error)


_tap.defvjp(lambda slot, value, error: (value, error), _tap_backward)


class _Slots(NamedTuple):
    """Zeros whose derivatives are the sums, by key. In the outermost loop there is one for each iteration."""

    by_key: dict[Key, Any]
    in_loop: bool = False

    def split(self, key: Key) -> tuple[dict[Key, Any], _Slots]:
        """Those of the roundings inside of a loop, to be scanned over, and all others."""
        if self.in_loop:
            return {}, self
        mine = {k: v for k, v in self.by_key.items() if k[: len(key)] == key}
        return mine, _Slots({k: v for k, v in self.by_key.items() if k not in mine}, True)

    def joined(self, more: dict[Key, Any]) -> _Slots:
        return _Slots({**self.by_key, **more}, True)


def _hook(key: Key, outs: list[Any], errors: list[Any], slots: _Slots) -> list[Any]:
    if key not in slots.by_key:  # In the condition of a loop.
        return outs
    slot = slots.by_key[key]
    return [y if e is None else _tap(along(slot, y), y, e) for y, e in zip(outs, errors, strict=True)]


def loop_trips(program: Program) -> dict[Key, int]:
    """How often each `while` runs in float32."""
    evaluation = Evaluation(watch=lambda eqn, args, outs: None)
    counts = jax.jit(lambda inputs: evaluation.run(program.jaxpr, inputs)[1])(both(program))
    return {key: int(np.max(count.wide, initial=0)) for key, count in counts.items()}


def both(program: Program) -> list[Pair]:
    """The inputs of a program for an evaluation."""
    raised = [x.astype(jnp.float32) if is_half(x.dtype) else x for x in map(jnp.asarray, program.inputs)]
    return [Pair(x, x) for x in raised]


def measure(program: Program, directions: int) -> Measured:
    """Measures all roundings of a program in one evaluation and one backward pass for each direction.

    Args:
        program: The program.
        directions: Number of random directions for the spread.
    """
    trips = loop_trips(program) if _has_while(program.jaxpr) else {}
    sites = roundings(program.jaxpr, trips)
    evaluation = EvaluationInPieces(_hook, _Slots, trips)
    found = None
    for at in program.at_scales():
        here = _measured_at(at, evaluation, sites, directions)
        if found is None or np.isfinite(here.errors[-1]):
            found = here
        if not np.isinf(found.errors[-1]):
            break
    assert found is not None
    return found


def _measured_at(program: Program, evaluation: EvaluationInPieces, sites: list[Rounding], directions: int) -> Measured:
    slots = {s.key: jnp.zeros((2,) if s.length is None else (s.length, 2)) for s in sites}
    count, total = len(program.outs), len(program.outs) + len(program.grads)
    targets = [range(count), range(count, total)][: 2 if program.grads else 1]

    def exact(slots: dict[Key, Any]) -> Any:
        outs = evaluation.run(program.jaxpr, both(program), slots)[:total]
        return [_as_real(out.wide) for out in outs], [_as_real(out.half) for out in outs]

    outs, pull, rounded = jax.vjp(exact, slots, has_aux=True)
    errors, squares = zip(*map(_compared, outs, rounded), strict=True)
    del outs, rounded
    squares = np.asarray(jax.device_get(squares), np.float64)
    norms, sizes, lost, void = (np.sqrt([squares[[*t], i].sum() for t in targets]).astype(np.float32) for i in range(4))
    sums = []
    for draw in range(1 + directions):
        for target, members in enumerate(targets):
            scale = 1 / sizes[target] if sizes[target] > 0 else np.float32(0)
            cotangents = [
                _direction(e, i, draw, scale) if i in members else jnp.zeros_like(e) for i, e in enumerate(errors)
            ]
            sums.append(jax.device_get(pull(cotangents)[0]))
    sums = {s.key: np.stack([by_key[s.key] for by_key in sums]) for s in sites}
    found = _measured(sites, sums, np.maximum(norms, 1e-30), sizes, lost)
    return found._replace(errors=[float("nan") if v else e for v, e in zip(void, found.errors, strict=True)])


@jax.jit
def _compared(exact: Any, rounded: Any) -> Any:
    """The error of a result, and the squares of the norms of both, of what is finite.

    The third is infinite if rounding makes infinities or NaN, the fourth is one if nothing is finite in float32.
    """
    lost = jnp.any(jnp.isfinite(exact) & ~jnp.isfinite(rounded))
    void = jnp.float32(exact.size > 0) * ~jnp.any(jnp.isfinite(exact))
    exact, error = _finite(exact), _finite(rounded - exact)
    return error, (jnp.vdot(exact, exact), jnp.vdot(error, error), jnp.where(lost, jnp.inf, 0), void)


@jax.jit
def _direction(error: Any, number: Any, draw: Any, scale: Any) -> Any:
    """Where a result is looked at: along its error in the first draw, and in random signs then."""
    signs = jax.random.rademacher(jax.random.fold_in(jax.random.key(draw), number), error.shape, error.dtype)
    return jnp.where(draw == 0, scale * error, signs)


def _measured(sites: list[Rounding], sums: Any, norms: Any, sizes: Any, lost: Any) -> Measured:
    count = len(norms)
    signed, spread, iterations = [], [], []
    for target in range(count):
        found = [
            np.asarray(sums[s.key], np.float64)[target::count] / [norms[target], norms[target] ** 2] for s in sites
        ]
        totals = [f.reshape(f.shape[0], -1, 2).sum(1) for f in found]
        signed.append(np.array([t[0, 0] for t in totals]))
        spread.append(np.array([np.sqrt(t[1:, 1].mean()) for t in totals]))
        iterations.append({s.key: f[0, :, 0] for s, f in zip(sites, found, strict=True) if s.length is not None})
    # After an overflow half goes on with the float32 value, so that the difference alone would not show it.
    lengths = sizes / norms + lost
    errors = [float("inf" if np.isinf(s).any() else e) for e, s in zip(lengths, spread, strict=True)]
    return Measured(sites, signed, spread, iterations, errors)


def _as_real(x: Any) -> Any:
    x = jnp.asarray(x)
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x.astype(jnp.float32)


def _finite(x: Any) -> Any:
    return jnp.where(jnp.isfinite(x), x, 0)


def _has_while(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "while" or any(map(_has_while, inner_jaxprs(eqn))) for eqn in open_jaxpr(jaxpr).eqns
    )
