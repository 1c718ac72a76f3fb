"""Training goes on from a file as if it had never stopped, whoever wrote the file."""

import json
import pathlib
import pickle
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jamp
from tests.helpers import assert_bitwise_equal, assert_same_spec

ROOT = pathlib.Path(__file__).parents[2]
SCALE = jamp.DynamicLossScale(8.0, 3, period=5, hysteresis=2)
WRAPPED = {
    "dynamic": jamp.loss_scaled(SCALE, optax.adam(0.1)),
    "delayed": jamp.loss_scaled(jamp.DynamicLossScale.preset("mxnet"), optax.adam(0.1)),
    "static": optax.chain(jamp.loss_scaled(jamp.StaticLossScale(8.0)), optax.sgd(0.1)),
    "masters": jamp.mixed_precision(optax.adamw(0.1), "O3:bfloat16"),
    "split": jamp.mixed_precision(optax.adamw(0.1), "O3:bfloat16", storage="split"),
    "stochastic": jamp.loss_scaled(SCALE, jamp.stochastic_rounding(optax.adam(0.1), jax.random.key(3))),
    "accumulating": jamp.loss_scaled(SCALE, optax.MultiSteps(jamp.master_weights(optax.adam(0.1)), 2)),
}


def start(tx):
    params = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3).astype(jnp.bfloat16), "norm": jnp.ones(3)}
    return {"params": params, "opt_state": tx.init(params)}


def one_step(tx, state, i):
    grads = jax.tree.map(lambda p: jnp.sin(p + i).at[0].multiply(jnp.where(i == 2, jnp.nan, 1)), state["params"])
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def through_orbax(state, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", jax.eval_shape(lambda: state))


def through_async_manager(state, folder):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=True)
    with ocp.CheckpointManager(folder, options=options) as manager:
        manager.save(7, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        return manager.restore(7, args=ocp.args.StandardRestore(jax.eval_shape(lambda: state)))


def through_pickle(state, folder):
    """Typed random keys cannot be pickled, so their data are."""
    data = jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), state)
    (folder / "state").write_bytes(pickle.dumps(jax.tree.leaves(data)))
    leaves = pickle.loads((folder / "state").read_bytes())
    restored = jax.tree.map(jnp.asarray, jax.tree.unflatten(jax.tree.structure(state), leaves))
    return jax.tree.map(lambda x, old: jax.random.wrap_key_data(x) if is_key(old) else x, restored, state)


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@pytest.fixture(scope="module")
def run():
    """Trains with all wrappers side by side; one file then holds them all."""

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(states, i):
        return {n: one_step(tx, states[n], i) for n, tx in WRAPPED.items()}

    def run(states, steps):
        for i in steps:
            states = step(states, i)
        return states

    return run


@pytest.mark.parametrize("way", [through_orbax, through_async_manager, through_pickle])
def test_resumed_training_equals_unbroken_training(tmp_path, run, way):
    states = run({name: start(tx) for name, tx in WRAPPED.items()}, range(4))
    assert all(int(jamp.metrics(state["opt_state"])["skipped"]) == 1 for state in states.values())
    restored = way(states, tmp_path)
    assert_same_spec(restored, states)
    assert_bitwise_equal(restored, states)
    assert_bitwise_equal(run(restored, range(4, 8)), run(states, range(4, 8)))


def test_the_scale_alone_fits_into_json():
    scale = jamp.DynamicLossScale.from_state_dict(json.loads(json.dumps(SCALE.to_state_dict())))
    assert_bitwise_equal(scale, SCALE)


# Products with powers of two are exact, so it does not matter whether XLA rounds the sum of a product once or twice.
PLAIN = optax.chain(optax.clip(1.0), optax.add_decayed_weights(0.5), optax.sgd(0.25, momentum=0.5))
SWITCHES = {
    "loss_scaled": lambda tx: jamp.loss_scaled(jamp.DynamicLossScale(1.0), tx),
    "masters": lambda tx: jamp.master_weights(tx),
    "O3": lambda tx: jamp.mixed_precision(tx, "O3:bfloat16"),
    "O3 split": lambda tx: jamp.mixed_precision(tx, "O3:bfloat16", storage="split"),
    "stochastic": lambda tx: jamp.stochastic_rounding(tx, jax.random.key(0)),
    "plain": lambda tx: tx,
}


def plain_run(params, state, steps):
    for i in steps:
        grads = jax.tree.map(lambda p: jnp.full_like(p, 2.0**-i), params)  # noqa: B023
        updates, state = PLAIN.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", ["masters", "O3", "O3 split"])
def test_there_and_back_again_is_plain_training(key, name):
    """Three plain steps, three with masters, three plain: the same as nine plain ones, to the last bit."""
    params = {"w": jax.random.normal(key, (4, 3)), "norm": jnp.ones(3)}
    expected = plain_run(params, PLAIN.init(params), range(9))

    params, state = plain_run(params, PLAIN.init(params), range(3))
    tx = SWITCHES[name](PLAIN)
    half, wrapped = jamp.from_optax(tx, jamp.half_params(params), params, state)
    assert (half["w"].dtype, half["norm"].dtype) == (jnp.bfloat16, jnp.float32)
    for i in range(3, 6):
        updates, wrapped = tx.update(jax.tree.map(lambda p: jnp.full_like(p, 2.0**-i), half), wrapped, half)  # noqa: B023
        half = optax.apply_updates(half, updates)
    actual = plain_run(*jamp.to_optax(half, wrapped), range(6, 9))
    assert_same_spec(actual, expected)
    assert_bitwise_equal(actual, expected)


@pytest.mark.parametrize("name", SWITCHES)
def test_every_wrapper_takes_a_plain_state_and_gives_it_back(name):
    params, state = plain_run({"w": jnp.ones((4, 3))}, PLAIN.init({"w": jnp.ones((4, 3))}), range(3))
    tx = SWITCHES[name](PLAIN)
    new_params, wrapped = jamp.from_optax(tx, params, params, state)
    assert_same_spec(wrapped, tx.init(params))
    assert_bitwise_equal(jamp.to_optax(new_params, wrapped), (params, state))


def test_a_state_of_another_optimizer_is_refused():
    params = {"w": jnp.ones((4, 3))}
    tx = jamp.mixed_precision(optax.adam(0.1), "O2:float16")
    with pytest.raises(ValueError, match=r"\[0\].trace\['w'\]: float32\[4, 3\], expected nothing"):
        jamp.from_optax(tx, params, params, optax.sgd(0.1, momentum=0.9).init(params))
    with pytest.raises(ValueError, match=r"\[0\].mu\['w'\]: float32\[5\], expected float32\[4, 3\]"):
        jamp.from_optax(tx, params, params, optax.adam(0.1).init({"w": jnp.ones(5)}))
    with pytest.raises(ValueError, match=r"jamp.to_optax makes it so"):
        jamp.from_optax(tx, params, params, tx.init(params))


def test_the_code_in_the_documentation_runs():
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        exec(block, names)
    assert names["small"]["dense"].dtype == jnp.float16 and names["params"]["dense"].dtype == jnp.bfloat16


@pytest.mark.nightly
def test_a_run_killed_at_random_moments_ends_where_an_unbroken_one_does():
    """Two kills; `python -m benchmarks.studies.kill_resume --kills 20` does more."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "studies" / "kill_resume.py"),
        "--kills",
        "2",
        "--steps",
        "120",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed the run") == 2
