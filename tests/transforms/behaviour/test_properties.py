"""Random programs, at every level and in both half dtypes: they run, and compute what they compute in float64.

`JAMP_PROPERTY_EXAMPLES=50000` runs as many of them as one has time for, and `JAMP_PROPERTY_SEED=1` others.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, assume, given, reject, seed, settings
from hypothesis import strategies as st
from jax import lax

import jamp
from jamp.transforms.analysis.reading.axes import num_contracted
from tests.transforms.delicate_programs import DELICATE_OPERATIONS
from tests.transforms.harness import PRODUCTS, find, half_of, operand_dtypes, run, total, trace
from tests.transforms.library_programs import LIBRARY_OPERATIONS
from tests.transforms.programs import COLUMNS, ROWS, SHAPE, as_function, programs

EXAMPLES = int(os.environ.get("JAMP_PROPERTY_EXAMPLES", "60"))
SEED = int(os.environ.get("JAMP_PROPERTY_SEED", "0"))
POLICIES = [f"{level}:{half}" for level in ("OD", "O1", "O2", "O3") for half in ("bfloat16", "float16")]
# Float32 is the half of these.
OF_FLOAT64 = [f"{level}:float32,p=float64,o=float64" for level in ("OD", "O1", "O2")]
# Spacings of the half dtype that a result may be off. Of 50,000 programs the median was 0.4, the most 65.
SPACINGS = 32
# Times that it may be off by what rounding the inputs alone does, in a program that is ill conditioned.
CONDITIONING = 8

KEYS = jax.random.split(jax.random.key(0), 3)
M = jax.random.normal(KEYS[0], SHAPE)
V = jax.random.normal(KEYS[1], (COLUMNS,)) / 2
W = jax.random.orthogonal(KEYS[2], COLUMNS)

PARTS = 4  # Tests that share the programs, for as many processes.

random_programs = settings(
    max_examples=max(EXAMPLES // PARTS, 1),
    deadline=None,
    database=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def assert_within(actual, expected, pair, at_rounded):
    """Asserts that results in the wide dtype of a pair lie near those of the same program in float64.

    Where they don't, the program may be ill conditioned: `at_rounded()` gives what float64 computes from inputs that
    are rounded to half, and a result may be off by some times the difference that this alone makes.
    """
    eps = float(jnp.finfo(pair.narrow).eps)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    rounded = None
    for i, (a, e) in enumerate(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)):
        assert (a.dtype, e.dtype, a.shape) == (pair.wide, np.float64, e.shape)
        known = ~np.isnan(e)  # The gradient of a norm of zeros is NaN in float64 too.
        tolerance = SPACINGS * eps * float(np.abs(e).max(initial=1.0, where=known))
        if not np.abs(a - e).max(initial=0.0, where=known) <= tolerance:
            rounded = rounded or jax.tree.leaves(at_rounded())
            tolerance += CONDITIONING * float(np.abs(rounded[i] - e).max(initial=0.0, where=known))
        np.testing.assert_allclose(a[known], e[known], rtol=0, atol=tolerance)


def with_gradients(fn):
    """A function to the results of `fn` and to the gradients of their weighted sum, in one trace."""

    def loss(*args):
        out = fn(*args)
        return total(lambda: out)(), out

    def call(*args):
        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*args)
        return out, gradients

    return call


def with_tangents(fn):
    """A function to the results of `fn` and to their derivative in one direction."""
    return lambda *args: jax.jvp(fn, args, tuple(map(jnp.ones_like, args)))


def with_second_derivatives(fn):
    """A function to the gradients of the weighted sum of the results of `fn`, and to their derivative in one direction.

    A derivative rule can be right, and its own derivative wrong.
    """
    return with_tangents(lambda *args: with_gradients(fn)(*args)[1])


def batched(fn):
    """`fn` under `vmap`, on the first member of a batch."""

    def call(m, v, w):
        return jax.tree.map(lambda x: x[0], jax.vmap(fn, (0, None, None))(jnp.stack([m, -m]), v, w))

    return call


DERIVATIVES = {
    "none": lambda fn: fn,
    "reverse": with_gradients,
    "forward": with_tangents,
    "second": with_second_derivatives,
}
OFTEN = ["none", "reverse", "forward"] * 2 + ["second"]  # Which takes three times as long as the others.
OUTSIDE = {"nothing": lambda fn: fn, "jit": jax.jit, "remat": jax.checkpoint, "vmap": batched}


def reference(fn, derivative, rounded_to=np.float64):
    """What `fn` computes in float64, without derivatives where JAX itself has none, as of `while`.

    Rejects programs that JAX itself can not transform, such as a gradient of a `while` inside, and `vmap` of a
    callback. With a Ref in a checkpoint or a custom rule it fails in ways of its own (`KeyError`, `AttributeError`).
    """
    args = [np.asarray(x).astype(rounded_to).astype(np.float64) for x in (M, V, W)]
    try:
        with jax.enable_x64(True):
            return run(DERIVATIVES[derivative](fn), *args), derivative
    except Exception:
        if derivative != "none":
            return reference(fn, "none", rounded_to)
        reject()


def part_of_the_programs(number):
    """A test of its own share of the programs, the same on every run."""

    @seed(SEED + number)
    @random_programs
    @given(
        program=programs(),
        policy=st.sampled_from([*POLICIES, *OF_FLOAT64]),
        derivative=st.sampled_from(OFTEN),
        outside=st.sampled_from(sorted(OUTSIDE)),
    )
    def test(program, policy, derivative, outside):
        if names(program) & {*DELICATE_OPERATIONS, *LIBRARY_OPERATIONS, "converge"}:
            # At O3 counts and keys are half, by its word, and a loop that decides in half may end late or never.
            policy = policy.replace("O3", "O2")
            assume("half_precision" not in names(program))  # They are half by the user's.
        check_program(program, policy, derivative, outside)

    return test


def check_program(program, policy, derivative, outside):
    """Asserts that a program computes under a policy what it does in float64, and so do its derivatives."""
    fn = OUTSIDE[outside](as_function(program))
    expected, derivative = reference(fn, derivative)
    pair = jamp.get_policy(policy).pair
    with jax.enable_x64(pair.wide == np.float64):
        cast = OUTSIDE[outside](jamp.cast_fn(as_function(program), policy))
        actual = run(DERIVATIVES[derivative](cast), *(np.asarray(x).astype(pair.wide) for x in (M, V, W)))
    assert_within(actual, expected, pair, lambda: reference(fn, derivative, pair.narrow)[0])


test_random_programs_compute_what_they_do_in_float64_0 = part_of_the_programs(0)
test_random_programs_compute_what_they_do_in_float64_1 = part_of_the_programs(1)
test_random_programs_compute_what_they_do_in_float64_2 = part_of_the_programs(2)
test_random_programs_compute_what_they_do_in_float64_3 = part_of_the_programs(3)


@seed(SEED + PARTS)
@settings(random_programs, max_examples=max(EXAMPLES // 20, 1))
@given(program=programs())
def test_a_random_program_is_bit_for_bit_the_same_at_o0(program):
    fn = as_function(program)
    try:
        expected = run(fn, M, V, W)
    except Exception:
        reject()  # As above.
    actual = run(jamp.cast_fn(fn, "O0"), M, V, W)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e)


# Float32 by the user's word, by jamp's (solvers, iterations to convergence; angles, such as a short product that a sine
# reads; counts; what numbers beyond the half range scale; of four columns that are put together, which may be a pose or
# homogeneous points), or by the word of another policy. What libraries have is half in some of its products.
FULL_PRODUCTS = LIBRARY_OPERATIONS.keys() | {
    "carry_scaled",
    "cast_fn",
    "concatenate",
    "converge",
    "count",
    "dot_highest",
    "dynamic_slice",
    "full_precision",
    "move_numbers",
    "root",
    "scaled_large",
    "scaled_small",
    "sin",
    "solve",
}


def without_dead_code(program):
    """The program with each instruction reading the result of the last one."""
    return [(name, 0, arg if isinstance(arg, int) else without_dead_code(arg)) for name, _, arg in program]


def names(program):
    """Names of all instructions, those inside combinators included."""
    return {name for name, _, _ in program}.union(*(names(arg) for _, _, arg in program if not isinstance(arg, int)))


@seed(SEED + PARTS + 1)
@settings(random_programs, max_examples=max(EXAMPLES // 5, 1))
@given(
    program=programs().map(without_dead_code).filter(lambda program: not names(program) & FULL_PRODUCTS),
    policy=st.sampled_from([policy for policy in POLICIES if not policy.startswith("OD")]),
    derivative=st.sampled_from(sorted(DERIVATIVES)),
)
def test_all_products_of_a_random_program_are_in_half(program, policy, derivative):
    fn = as_function(program)
    try:
        jax.eval_shape(DERIVATIVES[derivative](fn), M, V, W)
    except Exception:
        reject()  # As above.
    jaxpr = trace(DERIVATIVES[derivative](jamp.cast_fn(fn, policy)), M, V, W)
    products = [eqn for eqn in find(jaxpr, *PRODUCTS) if eqn.outvars[0].aval.ndim and operand_dtypes(eqn)]
    in_space = [eqn for eqn in products if _may_map_space(eqn)]
    if any("float32" in operand_dtypes(eqn) for eqn in in_space):
        reject()  # What a rotation gives is a place, and products of places are in float32 too.
    products = [eqn for eqn in products if eqn not in in_space]
    assert {dtype for eqn in products for dtype in operand_dtypes(eqn)} <= {half_of(policy).name}


def _may_map_space(eqn):
    """Whether a product may be one with a rotation: of three numbers, such as the gradient of three scores."""
    return eqn.primitive is lax.dot_general_p and num_contracted(eqn) == ROWS == 3
