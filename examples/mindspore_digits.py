"""MindSpore's mixed-precision tutorial: its digits network in its five forms, and a step that returns loss and output.

The network is the tutorial's (784-512-512-10). Its data set is not on every machine, so the 8 x 8 digits that come with
scikit-learn are enlarged to its 28 x 28 pixels. Every form learns from float32 weights in float16.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import Parser, positive_int
from sklearn.datasets import load_digits

import jamp

BATCH = 64
SIZES = (784, 512, 512, 10)
HALF = jnp.float16


def init_network(key: jax.Array) -> list[dict[str, jax.Array]]:
    init = jax.nn.initializers.he_uniform()
    return [
        {"w": init(key, (fan_in, fan_out)), "b": jnp.zeros(fan_out)}
        for key, fan_in, fan_out in zip(jax.random.split(key, 3), SIZES[:-1], SIZES[1:], strict=True)
    ]


def dense(params, x):
    return x @ params["w"] + params["b"]


def network(params, images, dense: Callable = dense):
    x = images.reshape(len(images), -1)
    x = jax.nn.relu(dense(params[0], x))
    x = jax.nn.relu(dense(params[1], x))
    return dense(params[2], x)


# 1. `auto_mixed_precision(network, "O2")`.
network_o2 = jamp.cast_fn(network, policy="O2:float16")

# 2. `NetworkFP16`, `to_float` on every Dense: cast what goes into one layer, and say what comes out.
dense_fp16 = jamp.cast_fn(dense, policy=jamp.Policy(param_dtype=jnp.float32, compute_dtype=HALF, output_dtype=HALF))


def network_fp16(params, images):
    return network(params, images, dense=dense_fp16).astype(jnp.float32)


# 3. `NetworkFP16Manual`: the casts written by hand.
def network_fp16_manual(params, images):
    return network(jamp.cast_tree(params, HALF), images.astype(HALF)).astype(jnp.float32)


def forms() -> dict[str, tuple[Callable, optax.GradientTransformation]]:
    """Returns the tutorial's five forms by name: what computes the logits, and what updates the weights."""
    sgd = optax.sgd(1e-2)
    dynamic = jamp.loss_scaled(jamp.DynamicLossScale(2.0**16, period=50, factor=2), inner=sgd)
    return {
        "auto_mixed_precision, O2": (network_o2, dynamic),
        "NetworkFP16": (network_fp16, dynamic),
        "NetworkFP16Manual": (network_fp16_manual, dynamic),
        # 4. `build_train_network(level="O2", loss_scale_manager=FixedLossScaleManager())`, whose scale is 128.
        "build_train_network, O2": (network_o2, jamp.loss_scaled(jamp.StaticLossScale(128.0), inner=sgd)),
        # 5. `Model(amp_level="O2")`: the policy chooses the scaling too.
        "Model, amp_level O2": (network_o2, jamp.mixed_precision(sgd, policy="O2:float16")),
    }


def make_step(network: Callable, tx: optax.GradientTransformation) -> Callable:
    """Returns the tutorial's low-level step: it gives back the loss and the network's output beside the new state."""

    def loss_fn(params, images, labels):
        logits = network(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    @jax.jit
    def train_step(params, opt_state, images, labels):
        value_and_grad = jamp.scaled_value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, logits), grads = value_and_grad(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, logits

    return train_step


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """Returns 28 x 28 images with values from 0 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    images = jax.image.resize(images.reshape(-1, 8, 8) / 16, (len(images), 28, 28), "linear")
    return np.asarray(images, np.float32), labels.astype(np.int32)


def train(name: str, steps: int) -> list[float]:
    """Trains one form and returns the loss of every step."""
    network, tx = forms()[name]
    params = init_network(jax.random.key(0))
    opt_state = tx.init(params)
    step = make_step(network, tx)
    images, labels = load_images()
    rng = np.random.default_rng(0)
    losses = []
    for i in range(steps):
        chosen = rng.choice(len(images), BATCH, replace=False)
        params, opt_state, loss, logits = step(params, opt_state, images[chosen], labels[chosen])
        losses.append(float(loss))
        if i % 100 == 0 or i == steps - 1:
            accuracy = float((logits.argmax(-1) == labels[chosen]).mean())
            print(f"{name}: batch {i:4d}  loss {losses[-1]:.6f}  accuracy of the output {accuracy:.3f}")
    return losses


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    parser = Parser(prog="mindspore_digits.py", description=__doc__.splitlines()[0])
    parser.add_argument("--form", choices=("all", *forms()), default="all")
    parser.add_argument("--steps", type=positive_int, default=400)
    args = parser.parse_args(argv)
    names = forms() if args.form == "all" else (args.form,)
    return {name: train(name, args.steps) for name in names}


if __name__ == "__main__":
    main()
