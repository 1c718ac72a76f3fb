"""What is taken apart again: a large part and a small one are added in float32 if the large one is taken off."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from tests.transforms.harness import mixed_levels, trace

KEYS = jax.random.split(jax.random.key(0), 4)
W, V = jax.random.normal(KEYS[0], (32, 32)) / 6, jax.random.normal(KEYS[1], (32, 32)) / 6
X = 300 + 10 * jax.random.normal(KEYS[2], (16, 32))
Y = 300 + 10 * jax.random.normal(KEYS[3], (16, 32))


def correction(w, x):
    return jnp.tanh((x - 300) / 10 @ w)


def from_a_number(w, v, x, y):
    u = x + 5 * correction(w, x)
    return jnp.tanh((u - 300) / 10 @ v)


def by_a_negative_number(w, v, x, y):
    u = x - 5 * correction(w, x)
    return jnp.tanh((u + -300) / 10 @ v)


def of_neighbours(w, v, x, y):
    u = x + 5 * correction(w, x)
    return jnp.tanh(jnp.diff(u, append=u[:, :1]) / 10 @ v)


def from_another(w, v, x, y):
    u = x + 5 * correction(w, x)
    return jnp.tanh((u - y) / 10 @ v)


def in_a_loss_too(w, v, x, y):
    u = x + 5 * correction(w, x)
    return jnp.tanh(u / 300 @ v), ((u - y) ** 2).mean()


def of_means(w, v, x, y):
    u = x + 5 * correction(w, x)
    return jnp.tanh(u / 300 @ v), u.mean(-1) - y.mean(-1)


def through_calls(w, v, x, y):
    u = jax.jit(lambda w, x: x + 5 * correction(w, x))(w, x)
    return jax.jit(lambda u: jnp.tanh((u - 300) / 10 @ v))(u)


def scaled(w, v, x, y):
    u = x * (1 + 0.01 * correction(w, x))
    return jnp.tanh((u - 300) / 10 @ v)


def gates(w, v, x, y):
    gate = 1 + 0.01 * correction(w, x)
    return (100 * (gate - 1)) @ v


def of_a_step(w, v, x, y):
    """What is predicted by the second stage of a step belongs to the first."""
    half_way = x + correction(w, x)
    return jnp.tanh((x + correction(w, half_way) - 300) / 10 @ v)


def of_squares(w, v, x, y):
    """Energies before and after a small step, of which a network reads the latter."""
    u = x / 300 + 0.1 * correction(w, x)
    return (u**2).sum(-1) - ((x / 300) ** 2).sum(-1), jnp.tanh(u @ v)


def of_norms(w, v, x, y):
    u = x / 300 + 0.1 * correction(w, x)
    return jnp.linalg.norm(u, axis=-1) - jnp.linalg.norm(x / 300, axis=-1), jnp.tanh(u @ v)


PROGRAMS = [
    of_norms,
    of_squares,
    from_a_number, by_a_negative_number, of_neighbours, from_another, in_a_loss_too, of_means, through_calls, scaled,
    gates, of_a_step,
]  # fmt: skip


def distance(found, expected):
    return jnp.sqrt(sum(jnp.sum((a - b) ** 2) for a, b in zip(found, expected, strict=True)))


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
@mixed_levels
def test_a_large_part_that_is_taken_off_costs_no_digits(fn, level, half):
    """The error of a value and of gradients is that of rounding what products read: 300 in bfloat16 is off by one."""

    def both(w, v, x, y):
        loss = lambda *args: sum(jnp.sum(out**2) / out.size for out in jax.tree.leaves(fn(*args)))  # noqa: E731
        return jax.tree.leaves((fn(w, v, x, y), jax.grad(loss, (0, 1))(w, v, x, y)))

    expected = both(W, V, X, Y)
    cast = jamp.cast_fn(fn, f"{level}:{half}")
    loss = lambda *args: sum(jnp.sum(out.astype("float32") ** 2) / out.size for out in jax.tree.leaves(cast(*args)))  # noqa: E731
    found = jax.tree.leaves((cast(W, V, X, Y), jax.grad(loss, (0, 1))(W, V, X, Y)))
    for a, b in zip(found, expected, strict=True):
        assert distance([a.astype("float32")], [b]) <= 0.016 * distance([b], [0 * b])


def of_its_own_mean(w, v, x, y):
    """A norm over what a network adds to, as in each layer of a transformer."""
    u = x + 5 * correction(w, x)
    centred = u - u.mean(-1, keepdims=True)
    return jnp.tanh(centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) @ v) + u @ v


def of_its_mean_square(w, v, x, y):
    """The variance of a norm, as fast norms compute it."""
    u = x + 5 * correction(w, x)
    mean = u.mean(-1, keepdims=True)
    return jnp.tanh((u - mean) / jnp.sqrt((u**2).mean(-1, keepdims=True) - mean**2 + 1e-6) @ v) + u @ v


def of_its_maximum(w, v, x, y):
    u = x + 5 * correction(w, x)
    return jnp.exp(u - u.max(-1, keepdims=True)) @ v + u @ v


def of_none(w, v, x, y):
    return (x + 5 * correction(w, x)) @ v


@pytest.mark.parametrize(
    "fn",
    [of_its_own_mean, of_its_mean_square, of_its_maximum, of_none],
    ids=lambda fn: fn.__name__,
)
def test_other_sums_stay_half(fn):
    jaxpr = trace(jamp.cast_fn(fn, "O2:bfloat16"), W, V, X, Y)
    sums = [eqn for eqn in all_equations(jaxpr.jaxpr) if eqn.primitive.name == "add" and eqn.outvars[0].aval.ndim]
    assert any(eqn.outvars[0].aval.dtype == jnp.bfloat16 and eqn.outvars[0].aval.shape == X.shape for eqn in sums)


def all_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")):
            yield from all_equations(getattr(inner, "jaxpr", inner)) if hasattr(inner, "eqns") else ()


def assert_as_exact_as_by_hand(loss, params, *args):
    """Compares gradients with those of the same loss, in which nothing but what products read and give is half."""

    def product(a, b):
        return (a.astype("bfloat16") @ b.astype("bfloat16")).astype("float32")

    expected = jax.grad(loss)(params, *args)
    found = jax.jit(jax.grad(jamp.cast_fn(loss, "O2:bfloat16")))(params, *args)
    least = jax.jit(jax.grad(lambda *args: loss(*args, product=product)))(params, *args)
    for a, b, c in zip(found, least, expected, strict=True):
        assert distance([a], [c]) <= 1.5 * distance([b], [c]) + 0.002 * distance([c], [0 * c])


FUNCTIONS = {
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "erf": jax.scipy.special.erf,
    "softplus": jax.nn.softplus,
    "log_sigmoid": jax.nn.log_sigmoid,
    "relu": jax.nn.relu,
    "arctan": jnp.arctan,
    "cosh": jnp.cosh,
    "softmax": jax.nn.softmax,
}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("read", ["once", "twice"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_of_what_is_nearly_the_same_are_as_exact_as_their_difference(function, read):
    """A box is refined so, `sigmoid(logit(r) + x @ w) - r`: half lost 4 to 20 % of the gradient, by hand 0.4."""
    k = jax.random.split(jax.random.key(7), 4)
    w, v, u = 0.05 * W[:, :16], 5 * V[:16], V[16:]
    x, r, y = jax.random.normal(k[0], (64, 32)), jax.random.uniform(k[1], (64, 16)), jax.random.normal(k[2], (64, 32))

    def loss(params, x, r, product=jnp.matmul):
        w, v, u = params
        z = r + product(x, w)
        first = ((product(function(z) - function(r), v) - y) ** 2).mean()
        return first + ((product(z, u) - y) ** 2).mean() if read == "twice" else first

    assert_as_exact_as_by_hand(loss, (w, v, u), x, r)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("read", ["once", "twice"])
@pytest.mark.parametrize("function", [jnp.tanh, jax.nn.sigmoid, jnp.square, jnp.exp])
def test_so_are_functions_of_what_layers_made(function, read):
    """A derivative by two values: in half 5 to 28 % of the gradient were lost, by hand 0.4."""
    k = jax.random.split(jax.random.key(8), 2)
    x, y = jax.random.normal(k[0], (64, 32)), jax.random.normal(k[1], (64, 32))

    def loss(params, x, product=jnp.matmul):
        w, v = params
        h = jnp.tanh(product(x, w))
        z = h + 0.05 * jnp.tanh(product(h, v))
        slope = (function(z) - function(h)) / 0.05
        first = ((product(slope, w) - y) ** 2).mean()
        return first + ((product(z, v) - y) ** 2).mean() if read == "twice" else first

    assert_as_exact_as_by_hand(loss, (W, V), x)


def layer_norm(z):
    centred = z - z.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def twice(function):
    return lambda z, e: function(z + e) - function(z)


def with_rule(function, forward, backward):
    ruled = jax.custom_vjp(function)
    ruled.defvjp(forward, backward)
    return ruled


def wave(u):
    return jnp.sin(u) * u


def slope(u):
    return jnp.cos(u) * u + jnp.sin(u)


OF_OPERANDS = with_rule(wave, lambda u: (wave(u), u), lambda u, g: (g * slope(u),))
OF_RESULTS = with_rule(jnp.tanh, lambda u: (jnp.tanh(u), jnp.tanh(u)), lambda y, g: (g * (1 - y * y),))
OF_SLOPES = with_rule(wave, lambda u: (wave(u), slope(u)), lambda slopes, g: (g * slopes,))


def stacked(function, *moves):
    """What a loop stacks of a carry that it hands on as it is, moved in each iteration."""

    def twins(z, e):
        moved = lax.scan(lambda c, move: (c, function(c + move)), z, jnp.stack([move * e for move in moves]))[1]
        return moved[-1] - moved[0]

    return twins


TWINS = {
    "bounded": twice(jax.nn.relu),
    "in a rule": twice(jax.nn.softplus),
    "sliced": twice(lambda z: jnp.tanh(z[:, :16])),
    "moved": twice(lambda z: jnp.tanh(z.T).T),
    "split in a call": twice(jax.nn.glu),
    "multiplied by data": lambda z, e: 1.01 * z * jax.nn.sigmoid(1.01 * z) - z * jax.nn.sigmoid(z),
    "side by side": lambda z, e: (lambda u: u[:64] - u[64:])(jnp.tanh(jnp.concatenate([z + e, z]))),
    "stacked": lambda z, e: (lambda u: u[0] - u[1])(layer_norm(jnp.stack([z, z + e]))),
    "interpolated": lambda z, e: 0.99 * jax.nn.relu(z) + 0.01 * jax.nn.relu(-z) - jax.nn.relu(z),
    "in a loop": lambda z, e: lax.map(lambda q: jnp.tanh(q[0] + q[1]), (z, e)) - lax.map(jnp.tanh, z),
    "in a branch": lambda z, e: (lambda u: u[0] - u[1])(
        lax.cond(z.sum() > -1e9, lambda u: (jnp.tanh(u + e), jnp.tanh(u)), lambda u: (u, u), z)
    ),
    "by a rule that keeps its operand": twice(OF_OPERANDS),
    "by a rule that keeps its result": twice(OF_RESULTS),
    "by a rule that keeps its slope": twice(OF_SLOPES),
    "by a rule in a checkpoint": twice(jax.checkpoint(OF_OPERANDS)),
    "by a rule, of itself": lambda z, e: OF_OPERANDS(z + e) - wave(z),
    "stacked by a loop": stacked(jnp.tanh, 0.0, 1.0),
    "stacked by a loop, of a rule": stacked(OF_SLOPES, 0.0, 1.0, -2.0),
    "closed over by a loop": lambda z, e: jnp.diff(
        lax.map(lambda move: jnp.tanh(z + move), jnp.stack([0 * e, e])), axis=0
    )[0],
    "a range": lambda z, e: (lambda u: u.max(0) - u.min(0))(jnp.tanh(jnp.stack([z, z + e]))),
    "from their mean": lambda z, e: (lambda u: (u - u.mean(0))[0])(jnp.tanh(jnp.stack([z, z + e, z - e / 2]))),
    "of a derivative": twice(jax.grad(lambda u: jnp.sum(jax.nn.softplus(u) * u))),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("twins", TWINS.values(), ids=TWINS)
def test_cotangents_of_what_is_taken_apart_add_up_in_float32(twins):
    """Values, or cotangents, were rounded one by one on their way: 7 to 74 % of a gradient were lost, by hand 0.5."""
    k = jax.random.split(jax.random.key(9), 5)
    x, y, e = jax.random.normal(k[0], (64, 64)), jax.random.normal(k[1], (64, 8)), jax.random.normal(k[2], (64, 32))
    first, last = jax.random.normal(k[3], (64, 32)) / 8, jax.random.normal(k[4], (32, 8)) / 6

    def loss(params, x, e, product=jnp.matmul):
        taken = 100 * twins(product(x, params[0]), 0.01 * e)
        return ((product(taken, params[1][: taken.shape[-1]]) - y) ** 2).mean()

    assert_as_exact_as_by_hand(loss, (first, last), x, e)
