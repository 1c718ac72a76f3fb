"""Paddle's mixed-precision tutorial: three large linear layers, in float32, at O1, at O2, and at O1 with accumulation.

The sizes, the data, the loss, the optimizer and the printed lines are those of the tutorial, whose GPU
took 2.935 s in float32, 1.299 s at O1 (2.26 times as fast) and 0.888 s at O2 (3.31 times as fast). The time here leaves
the compilation out. On a CPU, try `--size 256`. The tutorial:
https://www.paddlepaddle.org.cn/documentation/docs/en/guides/01_paddle2.0_introduction/basic_concept/amp_en.html
"""

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from _shared import Parser, positive_int

import jamp

BATCH = 512  # a multiple of 8, as tensor cores like it
NUM_BATCHES = 50
ACCUMULATE = 10


def init_simple_net(key: jax.Array, size: int) -> list[dict[str, jax.Array]]:
    init = jax.nn.initializers.glorot_uniform()
    return [{"w": init(key, (size, size)), "b": jnp.zeros(size)} for key in jax.random.split(key, 3)]


def simple_net(params, x):
    x = jax.nn.relu(x @ params[0]["w"] + params[0]["b"])
    x = jax.nn.relu(x @ params[1]["w"] + params[1]["b"])
    return x @ params[2]["w"] + params[2]["b"]


class Variant(NamedTuple):
    """One way to train, under the line that the tutorial prints for it."""

    title: str
    policy: str
    tx: optax.GradientTransformation
    half_params: bool = False


def variants() -> list[Variant]:
    sgd = optax.sgd(1e-4)
    scaled = jamp.loss_scaled(jamp.DynamicLossScale(1024.0), inner=sgd)
    # At O2 the tutorial's `decorate` makes the parameters float16 and gives the optimizer float32 copies of them.
    decorated = jamp.loss_scaled(jamp.DynamicLossScale(1024.0), inner=jamp.master_weights(sgd))
    # Each small batch is unscaled and checked on its own, and the sum is kept in float32: the scale may change within
    # a window, and one overflow costs one small batch. The tutorial sums the gradients and does not average them.
    summed = optax.MultiSteps(sgd, every_k_schedule=ACCUMULATE, use_grad_mean=False)
    accumulated = jamp.loss_scaled(jamp.DynamicLossScale(1024.0), inner=summed)
    return [
        Variant("Default time:", "O0", jamp.loss_scaled(jamp.NoOpLossScale(), inner=sgd)),
        Variant("AMP time in O1 mode:", "O1:float16", scaled),
        Variant("AMP time in O2 mode:", "O2:float16", decorated, half_params=True),
        Variant(f"AMP time in O1 mode, accumulating {ACCUMULATE} batches:", "O1:float16", accumulated),
    ]


def make_step(variant: Variant) -> Callable:
    net = jamp.cast_fn(simple_net, policy=variant.policy)

    def mse(params, x, y):
        return jnp.mean((net(params, x) - y) ** 2)

    def train_step(params, opt_state, x, y):
        loss, grads = jamp.scaled_value_and_grad(mse, opt_state)(params, x, y)
        updates, opt_state = variant.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(train_step, donate_argnums=(0, 1))


def init_params(variant: Variant, size: int) -> list[dict[str, jax.Array]]:
    params = init_simple_net(jax.random.key(0), size)
    return jamp.half_params(params, "float16") if variant.half_params else params


def train(variant: Variant, data: list[tuple[jax.Array, jax.Array]], size: int, steps: int) -> tuple[float, float]:
    """Returns the seconds that `steps` steps take, without the compilation, and the last loss."""
    params = init_params(variant, size)
    opt_state = variant.tx.init(params)
    # From compute capability 8.0 on, GPUs multiply float32 in TF32 by default. Not around the half-precision variants:
    # there "highest" would keep every product in float32.
    exact = jax.default_matmul_precision("highest") if variant.policy == "O0" else contextlib.nullcontext()
    with exact:
        step = make_step(variant).lower(params, opt_state, *data[0]).compile()
    jax.block_until_ready((params, opt_state, data))
    start = time.perf_counter()
    for i in range(steps):
        params, opt_state, loss = step(params, opt_state, *data[i % len(data)])
    loss = float(loss)  # waits for the last step
    return time.perf_counter() - start, loss


def main(argv: list[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = Parser(prog="paddle_simplenet.py", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=positive_int, default=4096, help="width of the layers (default: 4096)")
    parser.add_argument("--steps", type=positive_int, default=5 * NUM_BATCHES, help="default: 250, five epochs of 50")
    args = parser.parse_args(argv)
    keys = jax.random.split(jax.random.key(1), (min(NUM_BATCHES, args.steps), 2))
    data = [tuple(jax.random.normal(key, (BATCH, args.size)) for key in pair) for pair in keys]
    results = {}
    for variant in variants():
        seconds, loss = train(variant, data, args.size, args.steps)
        results[variant.title] = seconds, loss
        print(f"loss = {loss:.8f}\n\n{variant.title}\ntotal time = {seconds:.3f} sec\n")
    default, *others = results.items()
    for title, (seconds, _) in others:
        print(f"Default time / {title.rstrip(':')} = {default[1][0] / seconds:.2f}")
    return results


if __name__ == "__main__":
    main()
