"""MXNet's float16 tutorial: ResNet-50 on synthetic data with multi-precision SGD, and fine-tuning a float32 checkpoint.

* `python examples/mxnet_resnet50.py benchmark`: images of noise, as with MXNet's `--benchmark 1`, to measure the speed.
* `python examples/mxnet_resnet50.py finetune`: train in float32, save, load, put a new head on, go on in half.

Both keep the weights in half precision, with a float32 master copy in the optimizer's state (MXNet's
`multi_precision=True`), and multiply the loss by 128. On a CPU, add `--size 32 --width 8 --batch 8 --steps 3`.
"""

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import resnet
from _shared import Parser, positive_int

import jamp


def multi_precision_sgd(learning_rate: float) -> optax.GradientTransformation:
    """Momentum SGD on a float32 master copy of half-precision weights, under a static loss scale of 128."""
    sgd = optax.sgd(learning_rate, momentum=0.9)
    return jamp.loss_scaled(jamp.StaticLossScale(128.0), inner=jamp.master_weights(sgd))


def float32_sgd(learning_rate: float) -> optax.GradientTransformation:
    """The same optimizer for float32 weights, without scaling."""
    return jamp.loss_scaled(jamp.NoOpLossScale(), inner=optax.sgd(learning_rate, momentum=0.9))


def noise(batch: int, size: int, classes: int) -> tuple[jax.Array, jax.Array]:
    images = jax.random.normal(jax.random.key(1), (batch, size, size, 3))
    return images, jax.random.randint(jax.random.key(2), (batch,), 0, classes)


def train(step: Callable, state: tuple, batch: tuple, steps: int) -> tuple[tuple, list[float], float]:
    """Returns the state, the loss of every step, and the images per second, compilation left out."""
    step = step.lower(*state, *batch).compile()
    losses = []
    jax.block_until_ready((state, batch))
    start = time.perf_counter()
    for _ in range(steps):
        *state, loss = step(*state, *batch)
        losses.append(loss)
    losses = [float(loss) for loss in losses]
    return tuple(state), losses, steps * len(batch[0]) / (time.perf_counter() - start)


def benchmark(args: Any) -> dict[str, list[float]]:
    """Trains on noise in float32 and in half, and prints the images per second of each."""
    model = resnet.ResNet(depth=50, width=args.width)
    batch = noise(args.batch, args.size, model.classes)
    results = {}
    for policy, tx in (("O0", float32_sgd(0.1)), ("O2:float16", multi_precision_sgd(0.1))):
        params, stats = resnet.init(model, 0, args.size)
        if policy != "O0":
            params = jamp.half_params(params, "float16")  # the weights of the norms stay float32
        state = (params, stats, tx.init(params))
        # Float32 is TF32 by default on GPUs of compute capability 8.0 and later. Around the half-precision variant
        # "highest" would keep every product in float32.
        exact = jax.default_matmul_precision("highest") if policy == "O0" else contextlib.nullcontext()
        with exact:
            _, results[policy], speed = train(resnet.make_step(model, policy, tx), state, batch, args.steps)
        print(f"{policy}: {speed:.1f} images/s, last loss {results[policy][-1]:.4f}")
    return results


def pretrain(args: Any, checkpoint: pathlib.Path) -> list[float]:
    """Trains in float32, writes params and statistics into the file, and returns the losses."""
    model = resnet.ResNet(depth=50, width=args.width)
    params, stats = resnet.init(model, 0, args.size)
    tx = float32_sgd(0.1)
    batch = noise(args.batch, args.size, model.classes)
    state, losses, _ = train(resnet.make_step(model, "O0", tx), (params, stats, tx.init(params)), batch, args.steps)
    checkpoint.write_bytes(flax.serialization.to_bytes(state[:2]))
    return losses


def load_with_new_head(args: Any, checkpoint: pathlib.Path, classes: int) -> tuple[resnet.ResNet, Any, Any]:
    """Returns a model for `classes` classes, its params with a fresh head, and its statistics, all in float32."""
    saved = flax.serialization.msgpack_restore(checkpoint.read_bytes())
    model = resnet.ResNet(depth=50, width=args.width, classes=classes)
    params, stats = resnet.init(model, 3, args.size)
    params = flax.serialization.from_state_dict(params, {**saved["0"], "head": params["head"]})
    return model, params, flax.serialization.from_state_dict(stats, saved["1"])


def finetune(args: Any) -> dict[str, list[float]]:
    """Loads a float32 checkpoint, gives it a head for the 101 classes of Caltech-101, and goes on in float16."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = pathlib.Path(folder) / "resnet50_float32.msgpack"
        results = {"float32": pretrain(args, checkpoint)}
        model, params, stats = load_with_new_head(args, checkpoint, classes=101)
    params = jamp.half_params(jax.tree.map(jnp.asarray, params), "float16")
    stats = jax.tree.map(jnp.asarray, stats)
    tx = multi_precision_sgd(0.01)
    batch = noise(args.batch, args.size, model.classes)
    step = resnet.make_step(model, "O2:float16", tx)
    _, results["float16"], _ = train(step, (params, stats, tx.init(params)), batch, args.steps)
    for name, losses in results.items():
        print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return results


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    parser = Parser(prog="mxnet_resnet50.py", description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=("benchmark", "finetune"))
    parser.add_argument("--steps", type=positive_int, default=50)
    parser.add_argument("--batch", type=positive_int, default=256)
    parser.add_argument("--size", type=positive_int, default=224, help="height and width of the images")
    parser.add_argument("--width", type=positive_int, default=64, help="channels of the first convolution")
    args = parser.parse_args(argv)
    return {"benchmark": benchmark, "finetune": finetune}[args.program](args)


if __name__ == "__main__":
    main()
