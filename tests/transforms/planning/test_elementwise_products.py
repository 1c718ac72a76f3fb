"""Products that contract nothing are elementwise: written by `einsum`, they are as exact as `x * y`, and no more."""

import jax
import jax.numpy as jnp
import pytest

import jamp

LENGTH, WIDTH, HEADS = 32, 16, 2
TABLE = jnp.cos(jnp.arange(2.0 * LENGTH * WIDTH)).reshape(2, LENGTH, WIDTH)
KEYS = jax.random.split(jax.random.key(0), 2)
WEIGHTS = jax.random.normal(KEYS[0], (2, WIDTH, HEADS, WIDTH)) / 4
X = jax.random.normal(KEYS[1], (2, LENGTH, WIDTH))


def scores(turn, table):
    def fn(weights, x):
        queries, keys = (turn(jnp.einsum("blm,mhk->bhlk", x, each), table) for each in weights)
        return jnp.einsum("bhqk,bhlk->bhql", queries, keys)

    return fn


def by_einsum(x, table):
    return jnp.einsum("bhlk,blk->bhlk", x, table)


def by_einsum_of_rows(x, table):
    return jnp.einsum("bhlk,lk->bhlk", x, table[0])


def by_hand(x, table):
    return x * table[:, None]


@pytest.mark.parametrize("turn", (by_einsum, by_einsum_of_rows, by_hand))
@pytest.mark.parametrize("level", ("O1", "O2"))
def test_rotary_tables_leave_attention_half(turn, level):
    report = jamp.report(scores(turn, TABLE), WEIGHTS, X, policy=f"{level}:bfloat16")
    assert report.forward.share == 1


def test_what_they_multiply_is_kept_in_half():
    report = jamp.report(scores(by_einsum, TABLE), WEIGHTS, X, policy="O2:bfloat16")
    assert report.residual_bytes.keys() == {"bfloat16"}


def test_phases_of_positions_are_exact():
    def fn(positions, frequencies):
        return jnp.sin(jnp.einsum("l,k->lk", positions, frequencies))

    args = jnp.arange(1000.0), 1 / 100.0 ** jnp.linspace(0, 1, 8)
    assert jnp.allclose(jamp.cast_fn(fn, "O2:bfloat16")(*args), fn(*args), atol=1e-5)
