"""Haiku and `jax.pmap`, the way of data parallelism before `shard_map`: one network on several devices, in half.

    python examples/pmap_haiku.py                    # four devices, made of one CPU
    python examples/pmap_haiku.py --devices 8        # eight
    python examples/pmap_haiku.py --native           # the devices that there are

Each device computes the gradients of its part of the batch. Half-way through, one device's part is infinite: all of
them skip that step, halve the loss scale, and go on with the same parameters.
"""

import os
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _shared import Parser, png_path, policy, positive_int
from sklearn.datasets import load_digits

import jamp

BATCH = 32  # On each device.


def network(images: jax.Array) -> jax.Array:
    """A perceptron in float32, like most models."""
    return hk.Sequential([hk.Flatten(), hk.Linear(128), jax.nn.relu, hk.Linear(128), jax.nn.relu, hk.Linear(10)])(
        images
    )


class State(NamedTuple):
    """What a step takes and returns, with a copy for each device on the leading axis."""

    params: Any
    opt_state: Any


def make_step(spec: str):
    """Returns the optimizer, the parameters' initializer and the train step of a policy."""
    model = hk.without_apply_rng(hk.transform(network))
    apply_fn = jamp.cast_fn(model.apply, spec)
    tx = jamp.mixed_precision(optax.adam(1e-3), spec, axis_name="devices")

    def loss_fn(params, images, labels):
        return optax.softmax_cross_entropy_with_integer_labels(apply_fn(params, images), labels).mean()

    def step(state, images, labels):
        loss, grads = jamp.scaled_value_and_grad(loss_fn, state.opt_state)(state.params, images, labels)
        grads = jamp.average_gradients(grads, "devices")
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), jax.lax.pmean(loss, "devices")

    return tx, model.init, step


def plot(losses: list[float], scales: list[float], path) -> None:
    """Draws the loss, and under it the loss scale with the step that all devices skipped."""
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(7, 4.4), sharex=True, height_ratios=(3, 1))
    upper.plot(losses, color="tab:orange")
    upper.set(ylabel="training loss", title="Haiku under pmap, float16", ylim=(0, 2.5))
    lower.step(range(len(scales)), scales, where="post", color="tab:blue")
    lower.set(ylabel="loss scale", xlabel="step")
    lower.set_yscale("log", base=2)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: list[str] | None = None) -> tuple[State, list[float]]:
    parser = Parser(prog="pmap_haiku.py", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=policy, default="O2:float16")
    parser.add_argument("--steps", type=positive_int, default=100)
    parser.add_argument("--devices", type=positive_int, default=4, help="how many devices one CPU passes for")
    parser.add_argument("--native", action="store_true", help="use the devices that there are")
    parser.add_argument("--out", type=png_path, default="out/pmap_haiku.png")
    args = parser.parse_args(argv)
    if not args.native:
        # It counts if no array has been made yet.
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
        )
    devices = jax.local_devices()[: None if args.native else args.devices]

    tx, init, step = make_step(args.policy)
    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target
    params = init(jax.random.key(0), images[:1])
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(devices)), State(params, tx.init(params)))
    step = jax.pmap(step, axis_name="devices", devices=devices)

    rng, losses, scales = np.random.default_rng(0), [], []
    for i in range(args.steps):
        chosen = rng.choice(len(images), (len(devices), BATCH))
        batch = images[chosen]
        if i == args.steps // 2:
            batch[-1] = np.inf
        state, loss = step(state, batch, labels[chosen])
        metrics = jamp.metrics(jax.tree.map(lambda leaf: leaf[0], state.opt_state))
        losses.append(float(loss[0]))
        scales.append(float(metrics["loss_scale"]))
        if i % 20 == 0 or i == args.steps - 1:
            print(f"step {i:3d}  loss {loss[0]:.3f}  scale {metrics['loss_scale']:g}  skipped {metrics['skipped']}")
    copies = [np.ptp(np.asarray(leaf), axis=0).max() for leaf in jax.tree.leaves(state.params)]
    print(f"{len(devices)} devices; their parameters differ by {max(copies):g}")
    plot(losses, scales, args.out)
    return state, losses


if __name__ == "__main__":
    main()
