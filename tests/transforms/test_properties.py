"""Random programs, at every level and in both half dtypes: they run, and compute what they compute in float32.

`JAMP_PROPERTY_EXAMPLES=50000` runs as many of them as one has time for.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jamp
from tests.transforms.harness import half_of, run, total
from tests.transforms.programs import COLUMNS, SHAPE, as_function, programs

EXAMPLES = int(os.environ.get("JAMP_PROPERTY_EXAMPLES", "2000"))
POLICIES = [f"{level}:{half}" for level in ("OD", "O1", "O2", "O3") for half in ("bfloat16", "float16")]
ERRORS = 64  # Rounding errors of the half dtype that a result may be off; a gradient twice as many.

KEYS = jax.random.split(jax.random.key(0), 3)
M = jax.random.normal(KEYS[0], SHAPE)
V = jax.random.normal(KEYS[1], (COLUMNS,)) / 2
W = jax.random.normal(KEYS[2], (COLUMNS, COLUMNS)) / 2

random_programs = settings(
    max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)


def assert_within(actual, expected, tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        a, e = np.asarray(a), np.asarray(e)
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * max(1.0, float(np.abs(e).max())))


def gradient_or_none(fn):
    """Gradients of `fn` in float32; None where JAX itself cannot differentiate it, as with `while`."""
    try:
        return run(jax.grad(total(fn), (0, 1, 2)), M, V, W)
    except (ValueError, TypeError, NotImplementedError):
        return None


@random_programs
@given(program=programs(), policy=st.sampled_from(POLICIES))
def test_a_random_program_computes_what_it_does_in_float32(program, policy):
    fn = as_function(program)
    cast = jamp.cast_fn(fn, policy)
    tolerance = ERRORS * float(jnp.finfo(half_of(policy)).eps)
    assert_within(run(cast, M, V, W), run(fn, M, V, W), tolerance)
    gradient = gradient_or_none(fn)
    if gradient is not None:
        assert_within(run(jax.grad(total(cast), (0, 1, 2)), M, V, W), gradient, 2 * tolerance)


@settings(random_programs, max_examples=max(EXAMPLES // 20, 1))
@given(program=programs())
def test_a_random_program_is_bit_for_bit_the_same_at_o0(program):
    fn = as_function(program)
    for a, e in zip(*(jax.tree.leaves(run(f, M, V, W)) for f in (jamp.cast_fn(fn, "O0"), fn)), strict=True):
        np.testing.assert_array_equal(a, e)
