"""Train on real handwritten digits at every precision level, and compare: `python examples/digits.py`.

Two models that know nothing of precision, a small convolutional net with BatchNorm in Flax linen and a 3-layer MLP in
plain JAX, are trained on scikit-learn's bundled digits in float32 (O0) and at O1, O2 and O3, in float16 with dynamic
loss scaling and in bfloat16. Runs of one model share the initial weights and the order of the data, so that what
differs is the precision alone.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _digits_report import Run, plot, table
from _shared import (
    Parser,
    matmul_share_in_half,
    png_path,
    policy_or_all,
    positive_int,
    residual_bytes,
    scaler_for,
    seed,
)
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jamp

POLICIES = ("O0", *(f"{level}:{dtype}" for dtype in ("float16", "bfloat16") for level in ("O1", "O2", "O3")))
BATCH = 64


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm and a classifier, in float32 like any model that was written without a thought."""

    @nn.compact
    def __call__(self, images, train: bool):
        x = images
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


def init_convnet(key):
    variables = ConvNet().init(key, jnp.zeros((1, 8, 8, 1)), train=False)
    return variables["params"], variables["batch_stats"]


def convnet(params, stats, images, train: bool):
    """Returns the logits and the running statistics, which change in training only."""
    variables = {"params": params, "batch_stats": stats}
    if not train:
        return ConvNet().apply(variables, images, train=False), stats
    logits, changed = ConvNet().apply(variables, images, train=True, mutable=["batch_stats"])
    return logits, changed["batch_stats"]


def init_mlp(key):
    """The network of MindSpore's mixed-precision tutorial, with 8 x 8 inputs where the tutorial has 28 x 28."""
    sizes = (64, 512, 512, 10)
    init = jax.nn.initializers.he_uniform()
    params = [
        {"w": init(key, (fan_in, fan_out)), "b": jnp.zeros(fan_out)}
        for key, fan_in, fan_out in zip(jax.random.split(key, 3), sizes[:-1], sizes[1:], strict=True)
    ]
    return params, None


def mlp(params, stats, images, train: bool):
    del train  # nothing in it behaves otherwise in training
    x = images.reshape(len(images), -1)
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"], stats


MODELS = {"conv": (init_convnet, convnet), "mlp": (init_mlp, mlp)}


def load_data():
    """Returns train images, train labels, test images, test labels. Half is held out, as in scikit-learn's own example."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    x, x_test, y, y_test = train_test_split(
        images, labels.astype(np.int32), test_size=0.5, stratify=labels, random_state=0
    )
    return x, y, x_test, y_test


def batches(images, labels, epochs: int, seed: int) -> Iterator:
    """Yields shuffled batches of one size: a last, smaller one would compile the step again."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(images) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield images[chosen], labels[chosen]


def make_loss_fn(model: Callable, policy: jamp.Policy) -> Callable:
    forward = jamp.cast_fn(functools.partial(model, train=True), policy=policy)

    def loss_fn(params, stats, images, labels):
        logits, stats = forward(params, stats, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), stats

    return loss_fn


def make_step(loss_fn: Callable, tx: optax.GradientTransformation) -> Callable:
    @jax.jit
    def train_step(params, stats, opt_state, images, labels):
        value_and_grad = jamp.scaled_value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, stats), grads = value_and_grad(params, stats, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state, loss

    return train_step


def train(name: str, spec: str, data, epochs: int, seed: int, tick: Callable[[], None]) -> Run:
    """Trains one model at one policy and measures it."""
    init, model = MODELS[name]
    policy = jamp.get_policy(spec)
    scaler = scaler_for(policy, jamp.DynamicLossScale(2.0**16, period=50, factor=2))
    tx = jamp.mixed_precision(optax.sgd(1e-2, momentum=0.9), policy, loss_scale=scaler)
    params, stats = init(jax.random.key(seed))
    params = policy.cast_to_param(params)  # O3 keeps its params in half, and the optimizer their float32 masters
    opt_state = tx.init(params)
    loss_fn = make_loss_fn(model, policy)
    step = make_step(loss_fn, tx)
    losses, scales, seconds = [], [], []
    for batch in batches(*data[:2], epochs, seed):
        start = time.perf_counter()
        params, stats, opt_state, loss = jax.block_until_ready(step(params, stats, opt_state, *batch))
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
        scales.append(float(jamp.loss_scale(opt_state).loss_scale))
        tick()
    predict = jax.jit(jamp.cast_fn(functools.partial(model, train=False), policy=policy))
    predicted = predict(params, stats, data[2])[0].argmax(-1)
    loss_of_params = functools.partial(loss_fn, stats=stats, images=batch[0], labels=batch[1])
    return Run(
        model=name,
        policy=policy,
        accuracy=float((predicted == data[3]).mean()),
        losses=losses,
        scales=scales,
        step_seconds=statistics.median(seconds[1:] or seconds),  # the first one compiles
        half_share=matmul_share_in_half(jax.grad(loss_of_params, has_aux=True), params),
        residual_bytes=residual_bytes(loss_of_params, params),
        skipped=int(opt_state.skipped),
    )


def run_all(models, specs, data, epochs: int, seed: int, console: Console) -> list[Run]:
    steps = epochs * (len(data[0]) // BATCH)
    runs = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=steps * len(models) * len(specs))
        for name in models:
            for spec in specs:
                progress.update(task, description=f"{name} {spec}")
                runs.append(train(name, spec, data, epochs, seed, functools.partial(progress.advance, task)))
    return runs


def main(argv: list[str] | None = None) -> list[Run]:
    parser = Parser(prog="digits.py", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=policy_or_all, default="all", help="one policy, beside O0 (default: all)")
    parser.add_argument("--model", choices=("all", *MODELS), default="all")
    parser.add_argument("--epochs", type=positive_int, default=20)
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--out", type=png_path, default="digits.png", help="where the picture goes (a PNG file)")
    args = parser.parse_args(argv)
    models = MODELS if args.model == "all" else (args.model,)
    specs = POLICIES if args.policy == "all" else dict.fromkeys(("O0", args.policy))
    console = Console()
    runs = run_all(tuple(models), tuple(specs), load_data(), args.epochs, args.seed, console)
    console.print(table(runs))
    plot(runs, args.out)
    console.print(f"Loss and loss-scale curves: {args.out}")
    return runs


if __name__ == "__main__":
    main()
