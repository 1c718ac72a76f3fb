"""What a report tells of loops: which are kept as they are written so that they end, and which may not, in half."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

import jamp
from tests.inspect.programs import shape

W, X = shape(16, 16), shape(4, 16)
KEPT, IN_HALF = "loops to convergence", "loops that decide in half"
MIXED = ("OD:bfloat16", "O1:float16", "O2:bfloat16", "O2:float16")


def layer(w, z, x):
    return jnp.tanh(z @ w + x)


def settled(w, x, layer=layer):
    return lax.while_loop(
        lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-5) & (c[2] < 99),
        lambda c: (layer(w, c[0], x), c[0], c[2] + 1),
        (x, x + 1, 0),
    )[0]


def frozen(w, x):
    def step(carry, _):
        z, done = carry
        new = jnp.where(done, z, layer(w, z, x))
        return (new, done | (jnp.abs(new - z).max() < 1e-4)), None

    return lax.scan(step, (x, False), None, length=50)[0][0]


def halved(w, x):
    """Counts steps of descent, each as long as it lowers a value: what is computed for that ends the loop inside."""

    def value(z):
        return jnp.sum((z @ w - x) ** 2)

    def descent(_, z):
        slope, limit = jax.grad(value)(z), value(z)
        length = lax.while_loop(lambda t: value(z - t * slope) > limit, lambda t: t * 0.5, jnp.float32(1))
        return z - length * slope

    return lax.fori_loop(0, 5, descent, x)


def clocked(w, x):
    return lax.while_loop(lambda c: c[1] < 1.05, lambda c: (layer(w, c[0], x), c[1] + 0.1), (x, 0.0))[0]


def denoised(w, x):
    def step(carry):
        z, sigma = carry
        return z + (z - layer(w, z, x)) / sigma * (0.7 * sigma - sigma), 0.7 * sigma

    return lax.while_loop(lambda c: c[1] > 0.01, step, (x, jnp.float32(10)))[0]


def searched(w, x, inside=lambda w, z: z):
    """A search with four beams, which ends when none that goes on is as good as the worst that is done."""

    def step(carry):
        h, live, done, i = carry
        h = layer(w, inside(w, h), x)
        live, chosen = lax.top_k((live[:, None] + jax.nn.log_softmax(h)).reshape(-1), 4)
        return h[chosen // 16], live, jnp.maximum(done, live - 0.1 * (chosen % 5)), i + 1

    start = (x, jnp.zeros(4), jnp.full(4, -1e9), 0)
    return lax.while_loop(lambda c: (c[3] < 20) & (c[2].min() < c[1].max()), step, start)[0]


def generated(w, x):
    def step(carry):
        h, _, i = carry
        h = layer(w, h, x)
        return h, jnp.argmax(h, -1), i + 1

    return lax.while_loop(lambda c: (c[1] != 0).any() & (c[2] < 20), step, (x, jnp.ones(4, int), 0))[0]


def cosine(w, x):
    """Nothing but elementwise operations, of half data."""
    h = x @ w
    return lax.while_loop(lambda c: jnp.abs(c[0] - c[1]).max() > 1e-5, lambda c: (jnp.cos(c[0]), c[0]), (h, h + 1))[0]


def beside(w, x):
    """A network that a scalar iteration runs beside."""
    step = functools.partial(layer, w)
    return lax.while_loop(
        lambda c: jnp.abs(c[0] - c[1]) > 1e-5,
        lambda c: (jnp.cos(c[0]), c[0], step(c[2], x)),
        (jnp.float32(1), jnp.float32(0), x),
    )[2]


def lines(fn, policy=None):
    """How many loops the report lists, by what it says of them."""
    text = str(jamp.report(fn, W, X, policy=policy))
    found = [line.split(", which")[0].strip() for line in text.splitlines() if ", which" in line]
    return {line[:25].strip(): int(line[25:]) for line in found}


@pytest.mark.parametrize("level", MIXED)
@pytest.mark.parametrize("fn", [settled, frozen, halved], ids=lambda fn: fn.__name__)
def test_loops_with_products_that_are_kept(fn, level):
    assert lines(fn, level) == {KEPT: 1}


@pytest.mark.parametrize("level", MIXED)
@pytest.mark.parametrize("fn", [clocked, denoised, searched, generated, cosine, beside], ids=lambda fn: fn.__name__)
def test_loops_without_a_product_that_is_kept(fn, level):
    assert lines(fn, level) == {}


def test_a_loop_around_one_that_is_kept():
    assert lines(lambda w, x: searched(w, x, inside=lambda w, z: settled(w, z)), "O2:bfloat16") == {KEPT: 1}


@pytest.mark.parametrize("level", ["O3:bfloat16", "O3:float16"])
def test_loops_that_decide_in_half(level):
    for fn in (settled, halved, searched, cosine):
        assert lines(fn, level) == {IN_HALF: 1}, fn


@pytest.mark.parametrize("fn", [frozen, clocked, denoised, generated, beside], ids=lambda fn: fn.__name__)
def test_loops_that_end_at_o3_too(fn):
    assert lines(fn, "O3:bfloat16") == {}


@pytest.mark.parametrize("level", [*MIXED, "O3:bfloat16"])
def test_what_a_mark_puts_in_half(level):
    half = functools.partial(settled, layer=jamp.half_precision(layer))
    assert lines(half, level) == lines(jamp.half_precision(settled), level) == {IN_HALF: 1}


@pytest.mark.parametrize("half", ["dot_general", "*solver*", "fn:layer"])
def test_what_a_rule_puts_in_half(half):
    def solved(w, x):
        with jax.named_scope("solver"):
            return settled(w, x, jax.jit(layer))

    assert lines(solved, jamp.get_policy("O2:bfloat16").with_rules(half=[half])) == {IN_HALF: 1}


def test_full_precision_around_it_is_what_to_write_instead():
    assert lines(jamp.full_precision(settled), "O3:bfloat16") == {}
    assert lines(settled, jamp.get_policy("O3:bfloat16").with_rules(full=["*"])) == {}
    # Around its body alone it is not enough: what the loop carries is still rounded.
    assert lines(functools.partial(settled, layer=jamp.full_precision(layer)), "O3:bfloat16") == {IN_HALF: 1}


def test_a_program_that_is_half_itself():
    def own(w, x):
        return settled(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))

    assert lines(own, "O2:bfloat16") == lines(own, "O0") == {IN_HALF: 1}
    assert lines(settled, "p=f32,c=bf16,o=f32") == {IN_HALF: 1}
    assert lines(settled, "O0") == {}


@pytest.mark.parametrize(("level", "expected"), [("O0", {}), ("O2:bfloat16", {KEPT: 1}), ("O3:bfloat16", {IN_HALF: 1})])
def test_loops_in_a_cast_fn_inside(level, expected):
    assert lines(lambda w, x: jamp.cast_fn(settled, level)(w, x).sum()) == expected


def test_a_primitive_of_others_with_a_jaxpr_that_lacks_its_constants():
    """As lineax has one of a Jacobian: the report was an error."""
    solver = Primitive("test_solver")
    solver.def_abstract_eval(lambda z, *_, jaxpr: z)

    def solve(w, z, x):
        closed = jax.make_jaxpr(lambda z: layer(w, z, x))(z)
        return solver.bind(z, *closed.consts, jaxpr=closed.jaxpr)

    assert lines(lambda w, x: settled(w, x, solve), "O2:bfloat16") == {}  # None of its products is jamp's.


def test_the_lines_say_where_and_what_to_write():
    kept = str(jamp.report(settled, W, X, policy="O2:bfloat16"))
    assert "1, which decide in float32: tests/inspect/test_endings.py" in kept
    assert "`jamp.half_precision` around the body" in kept
    half = str(jamp.report(settled, W, X, policy="O3:bfloat16"))
    assert "1, which may end late or never: tests/inspect/test_endings.py" in half
    assert "`jamp.full_precision` around the loop" in half
