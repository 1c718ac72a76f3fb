"""Loops over time: their float32 state, of which the backward pass is given half copies, and their constants."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from jamp.inspect import residuals
from tests.transforms.harness import EYE, SIZE, W, X, find, o2, trace

STEPS = 5
XS = jax.random.normal(jax.random.key(2), (STEPS, *X.shape))
ZERO = jnp.zeros_like(X)
FINE = 1 + 2.0**-10  # Rounded to bfloat16 it is 1.


def loop(step):
    """`step(state, gate)` over products of each input with a weight; it returns the next state and a result.

    The results are multiplied, so that nothing asks the gates to be float32.
    """

    def fn(w, xs, state):
        return lax.scan(lambda state, x: step(state, x @ w), state, xs)[1] @ EYE

    return fn


@loop
def gated(state, gate):
    state = gate * state + gate
    return state, jnp.tanh(state)


@loop
def integrated(state, gate):
    state = state + gate
    return state, state


def stacked(fn, half="bfloat16"):
    """Dtypes of what reverse mode keeps of the size of all states; the results are read in their own dtype."""
    kept = residuals(lambda *args: jnp.sum(o2(fn, half)(*args)), W, XS, ZERO)
    return sorted(r.dtype for r in kept if r.shape == XS.shape)


def gradients(fn, *args):
    return jax.grad(lambda *args: jnp.sum(fn(*args)), (0, 1, 2))(*args)


class TestState:
    """What a loop adds up is float32; derivatives are taken where it is rounded to bfloat16."""

    def test_no_float32_is_kept(self):
        assert stacked(gated) == ["bfloat16"] * 2  # The product, and the state.

    def test_of_two_cells_in_one_body(self):
        @loop
        def fn(states, gate):
            with jax.named_scope("first"):
                first = gate * states[0] + gate
                hidden = gate * jnp.tanh(first)
            gate = jnp.tanh(jnp.tanh(hidden) @ W)
            second = gate * states[1] + gate
            return (first, second), gate * jnp.tanh(second)

        kept = residuals(lambda xs: jnp.sum(o2(fn)(W, xs, (ZERO, ZERO))), XS)
        assert {r.dtype for r in kept if r.shape == XS.shape} == {"bfloat16"}

    def test_of_what_is_only_added_up_nothing_is_kept(self):
        assert stacked(integrated) == []

    def test_float16_has_not_the_range(self):
        assert stacked(gated, "float16") == ["float16", "float32"]

    def test_what_is_computed_is_not_rounded(self):
        """The state is 1 before an increment that bfloat16 has no digit for, and 64 of these are a sum."""
        fn = loop(lambda state, gate: (state + gate * state, state + gate * state - state))
        found = o2(fn)(EYE, jnp.full((64, SIZE, SIZE), 2.0**-10), jnp.ones((SIZE, SIZE)))
        assert jnp.allclose(found[-1], found[0] * (1 + 2.0**-10) ** 63, rtol=2.0**-8)

    def test_what_derivatives_read_is(self):
        """Of `state * gate + gate` for the gate: `state + 1`."""
        args = EYE, jnp.full((1, SIZE, SIZE), 2.0), jnp.full((SIZE, SIZE), FINE)
        _, of_xs, of_state = gradients(o2(loop(lambda state, gate: (state * gate + gate,) * 2)), *args)
        assert jnp.array_equal(of_xs, jnp.full_like(of_xs, 2.0))
        assert jnp.array_equal(of_state, jnp.full_like(of_state, 2.0))

    @pytest.mark.in_turns(3)
    @pytest.mark.parametrize("order", ["reverse", "forward", "second"])
    @pytest.mark.parametrize("result", [lambda x: x * x, jax.nn.relu, lambda x: jnp.where(x > 2, x, 3 * x)])
    def test_derivatives_at_half_numbers_are_exact(self, result, order):
        @loop
        def fn(state, gate):
            state = gate * state + gate
            return state, result(state)

        def derivatives(fn):
            if order == "reverse":
                return gradients(fn, EYE, xs, state)
            if order == "forward":
                return jax.jvp(fn, (EYE, xs, state), (EYE, xs, state))
            return jax.jvp(lambda *args: gradients(fn, *args), (EYE, xs, state), (EYE, xs, state))[1][1:]

        xs = jax.random.randint(jax.random.key(0), (2, 2, SIZE), -1, 2).astype(jnp.float32)
        state = jax.random.randint(jax.random.key(1), (2, SIZE), -1, 2).astype(jnp.float32)
        found, expected = jax.tree.leaves(derivatives(o2(fn))), jax.tree.leaves(derivatives(fn))
        assert any(jnp.any(leaf) for leaf in expected)
        assert all(jnp.array_equal(a, b) for a, b in zip(found, expected, strict=True))

    def test_a_mask_is_that_of_the_float32_state(self):
        @loop
        def fn(state, gate):
            state = state * gate
            return state, jnp.where(state > 1, 5 * state, state)

        args = EYE, jnp.ones((1, SIZE, SIZE)), jnp.full((SIZE, SIZE), FINE)
        assert jnp.array_equal(gradients(o2(fn), *args)[2], jnp.full_like(args[2], 5.0))

    def test_so_is_an_extremum(self):
        args = EYE, jnp.ones((1, SIZE, SIZE)), jnp.full((SIZE, SIZE), FINE)
        fn = loop(lambda state, gate: (state * gate, jnp.maximum(state * gate, 1)))
        assert jnp.array_equal(gradients(o2(fn), *args)[2], jnp.ones_like(args[2]))

    def test_the_exponent_of_an_exponential_is_float32(self):
        @loop
        def fn(state, gate):
            state = state + gate * state
            return state, jnp.exp(state)

        args = EYE, jnp.zeros((1, SIZE, SIZE)), jnp.full((SIZE, SIZE), FINE)
        assert jnp.allclose(gradients(o2(fn), *args)[2], jnp.exp(FINE), rtol=1e-6)
        assert "float32" in stacked(fn)

    def test_a_norm_of_the_state(self):
        @loop
        def fn(state, gate):
            state = state + gate * state
            return state, state / jnp.linalg.norm(state)

        assert "float32" not in stacked(fn)


def decay_once(state, norm, gate):
    gate = jnp.tanh(gate)
    return state * gate, norm * gate


def decay_twice(state, norm, gate):
    return state * jnp.tanh(gate), jnp.tanh(gate) * norm


def decay_seen_otherwise(state, norm, gate):
    gate = jnp.tanh(gate)
    return jnp.reshape(jnp.reshape(gate, -1) * jnp.reshape(state, -1), state.shape), norm * gate


DECAYS = [decay_once, decay_twice, decay_seen_otherwise]


class TestQuotients:
    """A sum and what it is divided by decay alike: of the gradient of the decay nothing is left."""

    @staticmethod
    def fn(decay):
        @loop
        def fn(states, gate):
            state, norm = decay(*states, gate)
            state, norm = state + gate, norm + 0.5 * gate
            return (state, norm), state / norm

        return fn

    @pytest.mark.parametrize("decay", DECAYS, ids=lambda decay: decay.__name__)
    def test_both_are_kept_in_float32(self, decay):
        kept = residuals(lambda *args: jnp.sum(o2(self.fn(decay))(*args)), W, XS, (ZERO, ZERO + 1))
        assert len([r for r in kept if r.shape == XS.shape and r.dtype == "float32"]) >= 2

    @pytest.mark.parametrize("decay", DECAYS, ids=lambda decay: decay.__name__)
    def test_the_gradient_cancels(self, decay):
        """All numbers are such that float32 is exact, but for the state, which has a digit that bfloat16 has not."""

        def fn(w, xs, state):
            def step(states, x):
                state, norm = decay(*states, x @ w)
                return (state, norm), None

            state, norm = lax.scan(step, (state, jnp.full_like(state, 2)), xs)[0]
            return state / norm

        args = EYE, jnp.ones((1, SIZE, SIZE)), jnp.full((SIZE, SIZE), FINE)
        found = gradients(o2(fn), *args)[1]
        assert jnp.max(jnp.abs(found)) < 2.0**-20

    def test_gates_of_their_own_and_constant_decays_leave_them_half(self):
        @loop
        def fn(states, gate):
            state, norm = 0.5 * states[0] + gate, jnp.tanh(gate) * states[1] + gate
            return (state, norm), jnp.tanh(state) * jnp.tanh(norm)

        kept = residuals(lambda xs: jnp.sum(o2(fn)(W, xs, (ZERO, ZERO))), XS)
        assert {r.dtype for r in kept if r.shape == XS.shape} == {"bfloat16"}


class TestConstants:
    """What a body makes of constants alone, for a product to read, is made once."""

    @staticmethod
    def fn(ws, xs, state):
        def step(state, x):
            return jnp.tanh((x + state) @ jnp.concatenate(ws, 1))[:, :SIZE], None

        return lax.scan(step, state, xs)[0] @ EYE

    def test_it_is_kept_once(self):
        kept = residuals(lambda ws: jnp.sum(o2(self.fn)(ws, XS, ZERO)), [W, W])
        assert [r.shape for r in kept if r.where.startswith("concatenate")] == [(SIZE, 2 * SIZE)]

    def test_it_is_taken_out_of_both_loops(self):
        gradient = trace(jax.grad(lambda ws: jnp.sum(o2(self.fn)(ws, XS, ZERO))), [W, W])
        assert [len(find(scan.params["jaxpr"], "concatenate")) for scan in find(gradient, "scan")] == [0, 0]


def test_no_loop_is_recomputed_in_a_loop_of_its_own():
    gradient = trace(lambda *args: gradients(o2(gated), *args), W, XS, ZERO)
    assert len(find(gradient, "scan")) == 2


def lorenz(state):
    def step(state, _):
        a, b, c = state
        moved = jnp.stack([10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c])
        return state + 0.01 * moved, moved

    return lax.scan(step, state, None, length=300)[0][0]


def lattice(state):
    def step(state, _):
        place, speed = state
        speed = speed - 0.05 * (place**3 - jnp.roll(place, 1) + place)
        return (place + 0.05 * speed, speed), None

    place, speed = lax.scan(step, (state, jnp.zeros_like(state)), None, length=100)[0]
    return (place**2 + speed**2).sum()


def rotated(state):
    def step(q, _):
        w, x, y, z = q
        turned = jnp.stack([w - 0.1 * x * z, x + 0.1 * w * z, y + 0.1 * z * x, z - 0.1 * y * w])
        return turned / jnp.sqrt((turned**2).sum()), None

    return lax.scan(step, state, None, length=50)[0][1]


@pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:bfloat16", "O2:float16"])
@pytest.mark.parametrize(("fn", "size"), [(lorenz, 3), (lattice, 16), (rotated, 4)])
def test_a_loop_without_anything_in_half_keeps_its_state_as_it_is(fn, size, policy):
    """Each Jacobian was rounded to half, and the product of 500 of them was up to 8 % off."""
    state = 3 + jax.random.normal(jax.random.key(size), (size,))
    expected, found = (jax.jit(jax.grad(f))(state) for f in (fn, jamp.cast_fn(fn, policy)))
    assert jnp.linalg.norm(found - expected) < 1e-5 * jnp.linalg.norm(expected)


def written_then_read(state, key, number):
    state = lax.dynamic_update_slice(state, key[None], (number, 0, 0))
    return state, jnp.einsum("bd,tbd->bt", key, state)


def added_then_read(state, key, number):
    state = state + jnp.einsum("bd,be->bde", key, key)
    return state, jnp.einsum("bd,bde->be", key, state)


def decayed_then_read(state, key, number):
    return added_then_read(0.99 * state, key, number)


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (written_then_read, (STEPS, *X.shape)),
        (added_then_read, (*X.shape, SIZE)),
        (decayed_then_read, (*X.shape, SIZE)),
    ],
)
def test_of_a_state_that_a_product_reads_once_it_moved_the_half_copy_is_kept(step, shape):
    """A cache of keys, written first, and linear attention: the float32 state was kept, and what moves it."""

    def fn(w, xs):
        def body(state, x):
            return step(state, x[0] @ w, x[1])

        return lax.scan(body, jnp.zeros(shape), (xs, jnp.arange(STEPS)))[1].sum()

    (kept,) = [r for r in residuals(lambda *args: o2(fn)(*args), W, XS) if r.shape == (STEPS, *shape)]
    assert kept.dtype == "bfloat16"
    found, expected = (jax.grad(f)(W, XS) for f in (o2(fn), fn))
    assert jnp.linalg.norm(found - expected) < 0.02 * jnp.linalg.norm(expected)


@pytest.mark.parametrize(("width", "dtype"), [(8, "bfloat16"), (512, "float32")])
def test_a_state_that_is_small_beside_all_else_is_kept_as_it_is(width, dtype):
    """Where a ray is, of which a network tells how far it may go on: half of it saves nothing, and turns the normal."""
    w, v = (jax.random.normal(key, (3, width)) / width**0.5 for key in jax.random.split(jax.random.key(1)))
    towards = jax.random.normal(jax.random.key(2), (16, 3))

    def march(w):
        def step(t, _):
            at = t[:, None] * towards - 2
            return t + 0.7 * (jnp.linalg.norm(at, axis=-1) + (jnp.tanh(at @ w) @ v.T).sum(-1)), None

        return lax.scan(step, jnp.zeros(16), None, length=STEPS)[0].sum()

    assert dtype in {r.dtype for r in residuals(o2(march), w) if r.shape == (STEPS, 16)}
