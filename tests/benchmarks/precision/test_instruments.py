"""The measuring instruments of the benchmarks; those that jamp brings are tested in `tests/inspect`."""

import jax
import jax.numpy as jnp

from benchmarks.precision import instruments

F32, BF16 = jnp.float32, jnp.bfloat16


def test_relative_error_is_over_all_leaves():
    reference = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    other = {"a": jnp.array([3.0], BF16), "b": jnp.array([5.0], BF16)}
    assert instruments.relative_error(other, reference) == 0.2


def test_perturbed_changes_floating_leaves_alone():
    tree = {"w": jnp.ones(4), "ids": jnp.arange(4), "key": jax.random.key(0)}
    changed = instruments.perturbed(tree, 1)
    assert not jnp.array_equal(changed["w"], tree["w"]) and changed["w"].dtype == F32
    assert changed["ids"] is tree["ids"] and changed["key"] is tree["key"]
