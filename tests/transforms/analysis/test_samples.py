"""Which integers and flags are data: those made of arguments or drawn, wherever, and not by comparing arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jamp._compat import inner_jaxprs, open_jaxpr
from jamp.transforms.analysis.samples import Samples

IDS, FLAGS, X = jnp.arange(8), jnp.ones(8, bool), jnp.ones(8)
KEY = jax.random.key(0)
F = jnp.float32
THREE = np.full(1, 3, np.int32)
PIXELS, PLACES = np.arange(8, dtype=np.uint8), np.arange(8, dtype=np.int32)


def conversions(jaxpr):
    """Operands of the conversions from integers and flags to floating values, in all jaxprs."""
    for eqn in jaxpr.eqns:
        to_float = eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == F
        if to_float and not jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating):
            yield eqn.invars[0]
        for inner in inner_jaxprs(eqn):
            yield from conversions(open_jaxpr(inner))


def are_data(fn, *args):
    """For each conversion to float32, whether what is converted is data."""
    program = jax.make_jaxpr(fn)(*args)
    samples = Samples(program)
    found = [atom in samples for atom in conversions(program.jaxpr)]
    assert found
    return found


def _looped(ids):
    """Shifts bits out of a carry, which begins as an argument, and counts beside it."""
    return lax.fori_loop(0, 3, lambda i, c: (c[0] >> 1, c[1] + c[0].astype(F) + i.astype(F)), (ids, X))[1]


@jax.custom_vjp
def _with_rule(ids):
    return ids.astype(F)


_with_rule.defvjp(lambda ids: (ids.astype(F), None), lambda _, ct: (ct,))


@jax.custom_jvp
def _with_tangents(ids):
    return ids.astype(F)


_with_tangents.defjvp(lambda ids, tangents: (ids[0].astype(F), tangents[0]))


@jax.custom_batching.custom_vmap
def _with_batches(ids):
    return ids.astype(F)


_with_batches.def_vmap(lambda size, batched, ids: (ids.astype(F), True))


def _on_devices(fn):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "d")
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)


def _until(ids):
    """A loop that ends by a condition, which converts as well, with constants of both."""
    return lax.while_loop(lambda c: (c[0] + ids).astype(F).sum() < 99, lambda c: (c[0] + 1, c[1] + ids.astype(F)),
                          (jnp.zeros((), int), X))  # fmt: skip


def _filled(ids):
    """A carry that begins as zeros, and is given data by its iterations."""
    return lax.scan(lambda c, i: (c + i, c.astype(F)), jnp.zeros((), int), ids)[1]


DATA = {
    "an argument": (lambda i: i.astype(F), IDS),
    "a flag": (lambda b: b.astype(F), FLAGS),
    "arithmetic": (lambda i: (3 * i - 1).astype(F), IDS),
    "wider": (lambda i: i.astype(jnp.int32).astype(F), IDS.astype(jnp.uint8)),
    "of another shape": (lambda i: jnp.concatenate([i[::2], i[1::2]]).reshape(2, 4).T.astype(F), IDS),
    "bits": (lambda i: (i >> 2 & 1).astype(F), IDS),
    "many bits": (lambda i: jnp.unpackbits(i).astype(jnp.int32).astype(F), IDS.astype(jnp.uint8)),
    "beyond a number": (lambda i: (i > 3).astype(F), IDS),
    "beyond one closed over": (lambda i: (i > jnp.asarray(THREE)).astype(F), IDS),
    "rounded": (lambda x: jnp.round(x).astype(int).astype(F), X),
    "signs": (lambda x: (x > 0).astype(F), X),
    "neither": (lambda b: (~b).astype(F), FLAGS),
    "both": (lambda b, c: (b & c).astype(F), FLAGS, FLAGS),
    "masked by places": (lambda b: (b & (jnp.arange(8) < 3)).astype(F), FLAGS),
    "in a jit": (lambda i: jax.jit(lambda i: i.astype(F))(i + 1), IDS),
    "in a checkpoint": (jax.checkpoint(lambda i: i.astype(F)), IDS),
    "in a scan": (lambda i: lax.scan(lambda c, i: (c, i.astype(F)), 0.0, i)[1], IDS),
    "of a carry": (_filled, IDS),
    "in a branch": (lambda i: lax.cond(True, lambda i: i.astype(F), lambda i: (i + 1).astype(F), i), IDS),
    "in a function with a rule": (_with_rule, IDS),
    "in one with tangents": (_with_tangents, IDS),
    "in one with batches": (lambda i: _with_batches(i + 1), IDS),
    "on devices": (_on_devices(lambda i: i.astype(F)), IDS),
    "until a condition holds": (_until, IDS),
    "of a callback": (lambda i: jax.pure_callback(np.abs, IDS, i).astype(F), IDS),
    "drawn": (lambda key: jax.random.bernoulli(key, 0.5, (8,)).astype(F), KEY),
    "drawn by data": (lambda key, x: jax.random.bernoulli(key, x).astype(F), KEY, X),
    "drawn signs": (lambda key: jax.random.rademacher(key, (8,), F), KEY),
    "drawn of a constant": (lambda: jax.random.randint(jax.random.key(0), (8,), 0, 9).astype(F),),
    "pixels closed over": (lambda: jnp.asarray(PIXELS).astype(jnp.int32).astype(F),),
}
WRITTEN = {
    "places": (lambda: jnp.arange(8).astype(F),),
    "places closed over": (lambda: jnp.asarray(PLACES).astype(F),),
    "bits of places": (lambda: (jnp.arange(8) & 3).astype(F),),
    "places on devices": (_on_devices(lambda x: x * jnp.arange(8).astype(F)), X),
    "a number": (lambda x: x * lax.broadcast(3, (8,)).astype(F), X),
    "a triangle": (lambda: jnp.tri(8, dtype=bool).astype(F),),
    "one-hot rows": (lambda i: jax.nn.one_hot(i, 8), IDS),
    "shifted one-hot rows": (lambda i: (i[:, None] - jnp.arange(8) == 0).astype(F), IDS),
    "one of two": (lambda i: (i[:, None] == jnp.asarray(PLACES[:2])).astype(F), IDS),
    "one of a few places": (lambda i: (i == (jnp.arange(8) & 3)).astype(F), IDS),
    "within lengths": (lambda n: (jnp.arange(8) < n[:, None]).astype(F), IDS),
    "of one segment": (lambda i: (i[:, None] == i).astype(F), IDS),
    "ranks": (lambda x: (x[:, None] < x).astype(F), X),
    "places beyond one closed over": (lambda: (jnp.arange(8) > jnp.asarray(THREE)).astype(F),),
    "one closed over": (lambda: jnp.asarray(THREE).astype(F),),
    "a counter": (lambda: lax.scan(lambda i, _: (i + 1, i.astype(F)), 0, length=3)[1],),
}


@pytest.mark.parametrize("program", DATA.values(), ids=DATA)
def test_what_is_given_or_drawn_is_data(program):
    assert all(are_data(*program))


@pytest.mark.parametrize("program", WRITTEN.values(), ids=WRITTEN)
def test_what_the_program_writes_is_none(program):
    assert not any(are_data(*program))


def test_what_an_outer_function_is_given_is_data():
    found = []
    jax.jit(lambda ids: found.append(are_data(lambda x: x * ids.astype(F), X)))(IDS)
    assert found == [[True]]


def test_of_a_loop_each_value_is_what_it_is():
    assert are_data(_looped, IDS) == [True, False]


def test_a_function_of_both_is_of_no_data():
    """What JAX traces once and calls twice has one plan."""
    as_float = jax.jit(lambda i: i.astype(F))
    assert are_data(lambda i: as_float(i) + as_float(jnp.arange(8)), IDS) == [False, False]


def test_a_loop_in_a_loop_is_walked_to_its_end():
    def inner(i, c):
        return lax.fori_loop(0, 2, lambda _, d: (d[1], d[2], d[0], d[3] + d[1].astype(F)), c)

    def fn(ids):
        return lax.fori_loop(0, 2, inner, (jnp.zeros_like(IDS), jnp.zeros_like(IDS), ids, X))[3]

    assert are_data(fn, IDS) == [True]
