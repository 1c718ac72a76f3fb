"""Recursions over time: what adds up for hundreds of steps adds up in float32, whatever it starts from.

Each is compared with float32 at the error that half-precision products alone would make.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.nn import logsumexp

import jamp
from jamp._compat import open_jaxpr
from jamp.transforms.analysis.loops.recurrences import Recurrences
from tests.transforms.harness import find, mixed_levels, trace

KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (200, 32))
W = jax.random.normal(KEYS[1], (32, 12)) / 6
SQUARE = jax.random.normal(KEYS[2], (32, 32)) / 8
STEP = 0.3 * jax.random.normal(KEYS[3], (12, 12))


def forward_algorithm_from_zeros(w):
    scores = lax.scan(lambda a, e: (logsumexp(a[:, None] + STEP, 0) + e, None), jnp.zeros(12), X @ w)[0]
    return logsumexp(scores)


def forward_algorithm_from_a_product(w):
    e = X @ w
    return logsumexp(lax.scan(lambda a, e: (logsumexp(a[:, None] + STEP, 0) + e, None), e[0], e[1:])[0])


def forward_algorithm_in_a_while_loop(w):
    e = X @ w
    return logsumexp(lax.fori_loop(1, len(e), lambda i, a: logsumexp(a[:, None] + STEP, 0) + e[i], e[0]))


def best_path(w):
    e = X @ w
    return lax.scan(lambda a, e: ((a[:, None] + STEP).max(0) + e, None), e[0], e[1:])[0].max()


def euler(w):
    return (lax.scan(lambda h, _: (h + jnp.tanh(h @ w) / 1000, None), X[:8] @ w, length=1000)[0] ** 2).mean()


def moving_average(w):
    features = jnp.tanh(X @ w)
    return (lax.scan(lambda m, t: (0.999 * m + 0.001 * t, None), features[0], features[1:])[0] ** 2).sum()


def discounted_return(w):
    rewards = (X @ w)[:, 0]
    return lax.scan(lambda total, r: (r + 0.99 * total, None), rewards[0], rewards[1:], reverse=True)[0]


PROBLEMS = [
    (forward_algorithm_from_zeros, W), (forward_algorithm_from_a_product, W), (forward_algorithm_in_a_while_loop, W),
    (best_path, W), (euler, SQUARE), (moving_average, SQUARE), (discounted_return, SQUARE),
]  # fmt: skip


@pytest.mark.in_turns(4)
@mixed_levels
@pytest.mark.parametrize("fn, w", PROBLEMS, ids=[fn.__name__ for fn, _ in PROBLEMS])
def test_values_and_gradients(fn, w, level):
    cast = jamp.cast_fn(fn, f"{level}:bfloat16")
    np.testing.assert_allclose(jax.jit(cast)(w), fn(w), rtol=0.01)
    if fn not in (forward_algorithm_in_a_while_loop, best_path):  # Another path has another gradient.
        expected = jax.jit(jax.grad(fn))(w)
        error = jnp.linalg.norm(jax.jit(jax.grad(cast))(w) - expected) / jnp.linalg.norm(expected)
        assert error < 0.01


@mixed_levels
def test_the_best_path_is_that_of_float32(level):
    def path(w):
        e = X @ w
        return lax.scan(lambda a, e: ((a[:, None] + STEP).max(0) + e, jnp.argmax(a[:, None] + STEP, 0)), e[0], e[1:])[1]

    same = jamp.cast_fn(path, f"{level}:bfloat16")(W) == path(W)
    assert same.mean() > 0.98


def test_the_state_of_an_rnn_stays_half():
    def rnn(w, h):
        return lax.scan(lambda h, x: (jnp.tanh(x @ w[:, :32] + h @ w), h), h, X)[0]

    for start in (jnp.zeros(32), X[0] @ SQUARE):
        (scan,) = find(trace(jamp.cast_fn(rnn, "O2:bfloat16"), SQUARE, start), "scan")
        assert {var.aval.dtype.name for var in scan.outvars} == {"bfloat16"}


Y = jax.random.normal(jax.random.key(1), (8, 4))
HEAD = jax.random.normal(jax.random.key(2), (32, 4)) / 6


def unrolled_euler(w):
    x = X[:8]
    for _ in range(40):
        x = x + jnp.tanh(x @ w) / 40
    return (x**2).mean()


def unrolled_euler_of_a_jitted_layer(w):
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    x = X[:8] @ w
    for _ in range(40):
        x = x + layer(w, x) / 40
    return (x**2).mean()


def unrolled_calls_of_a_step(w):
    step = jax.jit(lambda w, x: x + jnp.tanh(x @ w) / 100)
    x = X[:8] @ w
    for _ in range(200):
        x = step(w, x)
    return (x**2).mean()


def unrolled_checkpoints_of_a_step(w):
    """Each iteration is computed again in the backward pass; an average goes along."""

    @jax.checkpoint
    def step(state):
        x, average = state
        return 1.0 * x + jnp.tanh(x @ w) / 100, 0.9 * average + 0.1 * lax.stop_gradient(x)

    state = X[:8], jnp.zeros_like(X[:8])
    for _ in range(100):
        state = step(state)
    return (state[0] ** 2).mean() + state[1].mean()


def unrolled_calls_of_a_checkpoint(w):
    step = jax.jit(jax.checkpoint(lambda w, x: x + jnp.tanh(x @ w) / 100))
    x = X[:8] @ w
    for _ in range(200):
        x = step(w, x)
    return (x**2).mean()


def unrolled_runge_kutta(w):
    rate, x = lambda x: jnp.tanh(x @ w), X[:8]
    for _ in range(20):
        first = rate(x)
        second = rate(x + 0.025 * first)
        third = rate(x + 0.025 * second)
        x = x + 0.05 / 6 * (first + 2 * second + 2 * third + rate(x + 0.05 * third))
    return (x**2).mean()


def unrolled_training(w):
    def loss(w):
        return ((jnp.tanh(X[:8] @ w) @ HEAD - Y) ** 2).mean()

    for _ in range(40):
        w = w - 0.01 * jax.grad(loss)(w)
    return loss(w)


def unrolled_inpainting(w):
    x, given = X[:8], jnp.arange(32) < 8
    for _ in range(40):
        x = jnp.where(given, X[:8], x + jnp.tanh(x @ w) / 40)
    return (x**2).mean()


def unrolled_relus_in_scopes(w):
    x = jnp.abs(X[:8])
    for i in range(40):
        with jax.named_scope(f"step{i}"):
            x = jax.nn.relu(x.reshape(4, 64).reshape(8, 32) + jnp.tanh(x @ w) / 40)
    return (x**2).mean()


def unrolled_soft_thresholds(w):
    x = jnp.zeros((8, 32))
    for _ in range(40):
        x = x - 0.1 * ((x @ w - X[:8]) @ w.T)
        x = jnp.sign(x) * jnp.maximum(jnp.abs(x) - 1e-3, 0)
    return (x**2).mean()


def unrolled_diffusion_of_clipped_data(w):
    x, kept = X[:8], np.linspace(0.999, 0.01, 13)
    for i in range(12, 0, -1):
        noise = jnp.tanh(x @ w)
        clean = jnp.clip((x - np.sqrt(1 - kept[i]) * noise) / np.sqrt(kept[i]), -3, 3)
        x = np.sqrt(kept[i - 1]) * clean + np.sqrt(1 - kept[i - 1]) * noise
    return (x**2).mean()


LIMITED = [
    unrolled_inpainting, unrolled_relus_in_scopes, unrolled_soft_thresholds, unrolled_diffusion_of_clipped_data,
]  # fmt: skip


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("fn", LIMITED, ids=lambda fn: fn.__name__)
def test_unrolled_loops_that_limit_their_sum_add_up_in_float32(fn, half):
    expected = fn(SQUARE)
    tolerance = {"bfloat16": 5e-4, "float16": 1e-4}[half]  # One rounding of the state is off by more.
    np.testing.assert_allclose(jax.jit(jamp.cast_fn(fn, f"O2:{half}"))(SQUARE), expected, rtol=tolerance)


@pytest.mark.in_turns(4)
@mixed_levels
@pytest.mark.parametrize(
    "fn",
    [unrolled_euler, unrolled_euler_of_a_jitted_layer, unrolled_checkpoints_of_a_step, unrolled_calls_of_a_checkpoint,
     pytest.param(unrolled_runge_kutta, marks=pytest.mark.nightly),
     pytest.param(unrolled_calls_of_a_step, marks=pytest.mark.nightly),
     pytest.param(unrolled_training, marks=pytest.mark.nightly)],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_unrolled_loops_add_up_in_float32(fn, level):
    expected = jax.jit(jax.grad(fn))(SQUARE)
    actual = jax.jit(jax.grad(jamp.cast_fn(fn, f"{level}:bfloat16")))(SQUARE)
    assert jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected) < 0.015


def layers(ws, x, shared):
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return x @ ws[0]


def layers_in_a_jit(ws, x, shared):
    layer = jax.jit(lambda w, x: x + jnp.tanh(x @ w))
    for w in ws:
        x = layer(w, x)
    return x @ ws[0]


def checkpointed_layers(ws, x, shared):
    layer = jax.checkpoint(lambda w, x: x + jnp.tanh(x @ w))
    for w in ws:
        x = layer(w, x)
    return x @ ws[0]


def layers_with_a_shared_memory(ws, x, shared):
    for w in ws:
        x = x + jnp.tanh((x @ w) @ (shared @ w))
    return x @ ws[0]


def layers_with_relus(ws, x, shared):
    for w in ws:
        x = jax.nn.relu(x + jnp.tanh(x @ w))
    return x @ ws[0]


def layers_with_choices(ws, x, shared):
    for w in ws:
        x = jnp.where(x > 0, x + jnp.tanh(x @ w), jnp.abs(x))
    return x @ ws[0]


def layers_with_a_relu_in_a_checkpoint(ws, x, shared):
    layer = jax.checkpoint(lambda w, x: jax.nn.relu(x + jnp.tanh(x @ w)))
    for w in ws:
        x = layer(w, x)
    return x @ ws[0]


def gates_with_shared_weights(ws, x, shared):
    for _ in range(4):
        gate = jax.nn.sigmoid(x @ ws[0])
        x = jax.nn.relu(gate * x + (1 - gate) * jnp.tanh(x @ ws[1]))
    return x @ ws[0]


LAYERS = [
    layers, layers_in_a_jit, checkpointed_layers, layers_with_a_shared_memory, layers_with_relus, layers_with_choices,
    layers_with_a_relu_in_a_checkpoint, gates_with_shared_weights,
]  # fmt: skip


@pytest.mark.parametrize("fn", LAYERS, ids=lambda fn: fn.__name__)
def test_layers_with_weights_of_their_own_are_no_loop(fn):
    jaxpr = trace(jamp.cast_fn(fn, "O2:bfloat16"), [SQUARE, 2 * SQUARE, 3 * SQUARE], X, SQUARE)
    assert {eqn.outvars[0].aval.dtype.name for eqn in find(jaxpr, "add")} == {"bfloat16"}


def test_a_train_step_inside_is_no_loop():
    def stream(ws, x):
        for w in ws:
            x = jax.nn.relu(x + jnp.tanh(x @ w))
        return x

    def train(ws, x, network):
        gradients = jax.grad(lambda ws: (network(ws, x) ** 2).mean())(ws)
        return [jnp.clip(w - 0.1 * g, -1, 1) for w, g in zip(ws, gradients, strict=True)]

    for network in (lambda ws, x: layers(ws, x, None), stream):
        jaxpr = trace(lambda ws, x, network=network: train(ws, x, network), [SQUARE] * 12, X)
        assert Recurrences().sums(open_jaxpr(jaxpr)) == {}


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_a_ctc_loss_is_as_good_as_with_half_logits(half):
    """It selects log-probabilities with products, and adds them up for the length of the sequence."""
    x, labels = X.reshape(4, 50, 32), jax.random.randint(KEYS[3], (4, 10), 1, 12)

    def loss(logits):
        return optax.ctc_loss(logits, jnp.zeros((4, 50)), labels, jnp.zeros((4, 10))).mean()

    def by_hand(w):
        return loss((x.astype(half) @ w.astype(half)).astype(jnp.float32))

    expected, gradient = jax.value_and_grad(lambda w: loss(x @ w))(W)
    errors = []
    for fn in (by_hand, jamp.cast_fn(lambda w: loss(x @ w), f"O2:{half}")):
        value, actual = jax.jit(jax.value_and_grad(fn))(W)
        np.testing.assert_allclose(value, expected, rtol=1e-3)
        errors.append(jnp.linalg.norm(actual - gradient))
    assert errors[1] < 2 * errors[0]


class TestAssociativeScan:
    """The same recurrence in a tree: float32 as in a loop, and half for what reads the result."""

    DECAYS = jnp.full((256, 4), 1 - 2.0**-10)

    def recurrence(self, scan):
        def fn(x, decays):
            return scan(decays, x @ jnp.eye(4)) @ jnp.eye(4)

        return fn

    @staticmethod
    def tree(decays, x):
        return lax.associative_scan(lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1]), (decays, x))[1]

    @pytest.mark.in_turns(2)
    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("reverse", [False, True])
    def test_a_decay_that_half_rounds_to_one(self, level, reverse):
        def tree(decays, x):
            return self.tree(decays[::-1], x[::-1])[::-1] if reverse else self.tree(decays, x)

        fn, x = self.recurrence(tree), jnp.ones((256, 4))
        expected = fn(x, self.DECAYS)
        actual = jamp.cast_fn(fn, f"{level}:bfloat16")(x, self.DECAYS)
        assert jnp.max(jnp.abs(actual - expected) / expected) < 2.0**-8
        assert not jnp.allclose(expected[0 if reverse else -1], 256, rtol=0.05)  # What no decay would give.

    def test_the_gradient_of_the_decay(self):
        fn, x = self.recurrence(self.tree), jnp.ones((256, 4))
        of_decays = [jax.grad(lambda d, f=f: f(x, d).sum())(self.DECAYS) for f in (fn, jamp.cast_fn(fn, "O2:bfloat16"))]
        assert jnp.linalg.norm(of_decays[1] - of_decays[0]) < 0.01 * jnp.linalg.norm(of_decays[0])

    def test_what_reads_the_result_is_half(self):
        def fn(w, x):
            h = x @ w
            return jnp.tanh(h + lax.associative_scan(jnp.add, h)) @ w

        tanhs = find(trace(jamp.cast_fn(fn, "O2:bfloat16"), jnp.eye(8), jnp.ones((16, 8))), "tanh")
        assert [str(eqn.invars[0].aval.dtype) for eqn in tanhs] == ["bfloat16"]

    def test_other_strided_slices_stay_half(self):
        jaxpr = trace(jamp.cast_fn(lambda w, x: (x @ w)[::2] @ w, "O2:bfloat16"), jnp.eye(8), jnp.ones((16, 8)))
        assert [str(eqn.outvars[0].aval.dtype) for eqn in find(jaxpr, "slice")] == ["bfloat16"]


HANDED_ON = {
    "sorted": lambda y: jnp.sort(y, -1),
    "the best": lambda y: lax.top_k(y, 8)[0],
    "padded": lambda y: jnp.pad(y, 1)[1:-1, 1:-1],
    "cummax": lambda y: lax.cummax(y, axis=1),
    "a maximum": lambda y: jnp.broadcast_to(y.max(-1, keepdims=True), y.shape),
    "rounded to float32": lambda y: lax.reduce_precision(y, 8, 23),
    "by a choice": lambda y: lax.cond(y[0, 0] > 100, jnp.zeros_like, lambda y: y, y),
    "a set part": lambda y: jnp.zeros_like(y).at[:].set(y),
    "solved for": lambda y: jnp.linalg.solve(jnp.eye(4), y),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("hand_on", HANDED_ON.values(), ids=HANDED_ON)
def test_sums_that_are_handed_on_by_what_moves_them(hand_on, level):
    """No term reaches half of bfloat16's spacing at one."""

    def fn(w, x):
        return lax.scan(lambda y, _: (hand_on(y + y @ w), None), x, None, length=64)[0]

    w, x = jnp.eye(8) / 2**11, jnp.ones((4, 8))
    np.testing.assert_allclose(jamp.cast_fn(fn, f"{level}:bfloat16")(w, x), fn(w, x), rtol=1e-3)


FREQUENCIES = jnp.exp(1j * jnp.linspace(0, 1, 5))


def spectral_step(u):
    return jnp.fft.irfft(jnp.fft.rfft(u) * FREQUENCIES, 8)


SOLVERS = {
    "irfft": lambda u, f: spectral_step(u) + f(u),
    "inside": lambda u, f: spectral_step(u + f(u)),
    "split": lambda u, f: jnp.fft.ifft(jnp.fft.fft(u)).real + f(u),
    "a function": lambda u, f: jax.jit(spectral_step)(u) + jax.checkpoint(f)(u),
    "a loop inside": lambda u, f: lax.fori_loop(0, 2, lambda i, u: u + 0.0, u) + f(u),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("step", SOLVERS.values(), ids=SOLVERS)
def test_what_a_network_adds_to_a_solver_is_not_lost(step, level):
    """No term reaches half of bfloat16's spacing at one."""

    def fn(w, u):
        return lax.scan(lambda u, _: (step(u, lambda u: jnp.tanh(u @ w)), None), u, None, length=64)[0]

    w, u = jnp.eye(8) / 2**11, jnp.ones((4, 8))
    np.testing.assert_allclose(jamp.cast_fn(fn, f"{level}:bfloat16")(w, u), fn(w, u), rtol=1e-3)


def test_layers_with_transforms_are_half():
    """A Fourier neural operator: an activation bends what goes on."""

    def fn(weights, u):
        def layer(u, w):
            return jax.nn.gelu(spectral_step(u) + u @ w), None

        return lax.scan(layer, u, weights)[0]

    policy = jamp.get_policy("O2:bfloat16,o=bfloat16")
    (loop,) = (
        eqn
        for eqn in trace(jamp.cast_fn(fn, policy), jnp.ones((3, 8, 8)), jnp.ones((4, 8))).eqns
        if eqn.primitive.name == "scan"
    )
    assert loop.outvars[0].aval.dtype == jnp.bfloat16
