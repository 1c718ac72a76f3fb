"""Training programs of many fields lose no more precision under a policy than careful mixed precision by hand.

Each program is differentiated at O1 and at O2, in both half dtypes. The relative l2 errors of its losses, of the whole
gradient and of the gradient's worst leaf are at most 1.5 times those of the same program with its networks in half and
the rest in float32, or of rounding its inputs to half once. What fails today stands in `_failing.py`.
"""

import jax.numpy as jnp
import pytest

from tests.numerics import (
    broadcasts,
    corrections,
    coupled,
    edges,
    flows,
    frames,
    generative,
    geometry,
    graphs,
    images,
    iterations,
    losses,
    moments,
    physics,
    reinforcement,
    routing,
    sequences,
    simulators,
    solvers,
    statistics,
    streams,
    unrolled,
    with_libraries,
)
from tests.numerics._failing import FAILING, INHERENT
from tests.numerics._program import MANY_SEEDS, POLICIES, SEEDS, Program, allowed_errors, errors_at
from tests.transforms.harness import HALVES, equations, trace

FILES = (
    broadcasts, corrections, coupled, edges, flows, frames, generative, geometry, graphs, images, iterations, losses,
    moments, physics, reinforcement, routing, sequences, simulators, solvers, statistics, streams, unrolled,
    with_libraries,
)  # fmt: skip
PROGRAMS = {program.name: program for file in FILES for program in file.PROGRAMS}


def _cases():
    """Each program at all policies. By day one program in three runs at one of them, in turns."""
    for number, name in enumerate(PROGRAMS):
        for turn, policy in enumerate(POLICIES):
            reason = FAILING.get((name, policy))
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            marks += [] if turn == number % len(POLICIES) else [pytest.mark.nightly]
            yield pytest.param(name, policy, id=f"{name}-{policy}", marks=marks)


@pytest.mark.in_turns(6)
@pytest.mark.parametrize(("name", "policy"), list(_cases()))
def test_a_program_is_as_precise_as_careful_code(name, policy):
    program = PROGRAMS[name]
    half = policy.partition(":")[2]
    factor = INHERENT.get(name, (1.0, ""))[0]
    for seeds in (SEEDS, MANY_SEEDS):  # The worst of six draws is luck: another XLA makes it a third larger.
        errors, allowed = errors_at(program, policy, seeds), allowed_errors(program, half, seeds)
        beyond = errors.beyond(allowed, factor)
        if not beyond:
            return
    pytest.fail(f"{', '.join(beyond)} of {errors}, allowed are {allowed}")


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_is_written_in_float32(name):
    program = PROGRAMS[name]
    dtypes = {var.aval.dtype for eqn in equations(trace(program.fn, *program.arguments(0))) for var in eqn.outvars}
    assert not dtypes & {jnp.dtype(half) for half in HALVES}


def test_there_are_programs_of_every_kind():
    kinds = [program.finding for program in PROGRAMS.values()]
    assert len(PROGRAMS) == sum(len(file.PROGRAMS) for file in FILES) >= 60
    assert not [kind for kind in set(kinds) if kind and kinds.count(kind) < 2]


def test_the_tables_name_programs_and_policies():
    assert {name for name, _ in FAILING} | INHERENT.keys() <= PROGRAMS.keys()
    assert {policy for _, policy in FAILING} <= set(POLICIES)


def _difference(w, x, *, dtype=jnp.float32):
    """A small difference of large numbers, in float32 whatever `dtype` is."""
    del dtype
    return 1000.0 + x @ w - 1000.0


def test_what_is_less_precise_is_told():
    program = Program(_difference, lambda rng: (rng.normal(size=(8, 8)), rng.normal(size=(8, 8))))
    assert errors_at(program, "O0").value == 0.0
    assert errors_at(program, "O3:bfloat16").value > 10 * allowed_errors(program, "bfloat16").value
