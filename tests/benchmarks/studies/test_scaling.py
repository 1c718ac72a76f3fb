"""The measures of the scaling benchmark that do not depend on the machine's speed."""

import jax.numpy as jnp
import pytest

pytest.importorskip("jmp")
pytest.importorskip("flax")

from benchmarks.studies import scaling


def test_the_check_reads_gradients_once_and_writes_nothing():
    grads = [jnp.ones((256, 256))] * 2  # Two of a shape, so that XLA could share what it computes for them.
    passes = {name: scaling.memory_passes(check, grads) for name, check in scaling.CHECKS.items()}
    assert passes["jamp.loss_scaled(scale, inner)"] == pytest.approx(1.0, abs=1e-3)
    assert passes["jmp, select_tree"] > 2


def test_bytes_per_weight():
    sizes = scaling.bytes_per_weight()
    assert [round(size) for name, size in sizes.items() if name.startswith("sgd")] == [2, 6, 4]


@pytest.mark.nightly
def test_every_way_takes_a_step():
    loss, params, _ = scaling.models()["MLP, 3.1 M weights, batch 8"]
    small = [w[:4, :4] for w in params]
    times = scaling.step_times(loss, small, jnp.ones((2, 4)), rounds=1)
    assert times.keys() == scaling.WAYS.keys() and all(t > 0 for t in times.values())
