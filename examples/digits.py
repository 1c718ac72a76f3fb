"""Train on real handwritten digits at every precision level, and compare: `python examples/digits.py`.

Two models that know nothing of precision, a small convolutional net with BatchNorm in Flax linen and a 3-layer MLP in
plain JAX, are trained on scikit-learn's bundled digits in float32 (O0) and at O1, O2 and O3, in float16 with dynamic
loss scaling and in bfloat16. Runs of one model share the initial weights and the order of the data, so that what
differs is the precision alone.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _digits_report import Run, markdown, plot, table
from _shared import Parser, png_path, policy_or_all, positive_int, scaler_for, seed, text_path
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jamp

POLICIES = ("O0", *(f"{level}:{dtype}" for dtype in ("float16", "bfloat16") for level in ("O1", "O2", "O3")))
BATCH = 64


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm and a classifier, in float32 like most models."""

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
    """Returns train images and labels, test images and labels. Half is held out, as in scikit-learn's example."""
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
    def train_step(state, images, labels):
        params, stats, opt_state = state
        value_and_grad = jamp.scaled_value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, new_stats), grads = value_and_grad(params, stats, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        # The optimizer skips a step whose gradients overflowed, and the running statistics go with it.
        stats = jamp.select_tree(opt_state.grads_finite, new_stats, stats)
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    return train_step


def train(name: str, spec: str, data, epochs: int, seed: int, tick: Callable[[], None]) -> tuple[Run, Callable]:
    """Trains one model at one policy; returns the run, and a function that does one more step, for the clock."""
    init, model = MODELS[name]
    policy = jamp.get_policy(spec)
    scaler = scaler_for(policy, jamp.DynamicLossScale(2.0**16, period=50, factor=2))
    tx = jamp.mixed_precision(optax.sgd(1e-2, momentum=0.9), policy, loss_scale=scaler)
    params, stats = init(jax.random.key(seed))
    params = policy.cast_to_param(params)  # O3 keeps its params in half, and the optimizer their float32 masters
    state = params, stats, tx.init(params)
    loss_fn = make_loss_fn(model, policy)
    step = make_step(loss_fn, tx)
    losses, scales = [], []
    for batch in batches(*data[:2], epochs, seed):
        state, loss = step(state, *batch)
        losses.append(float(loss))
        scales.append(float(jamp.loss_scale(state[2]).loss_scale))
        tick()
    predict = jax.jit(jamp.cast_fn(functools.partial(model, train=False), policy=policy))
    predicted = predict(*state[:2], data[2])[0].argmax(-1)

    def logits_of(params):
        return model(params, stats, batch[0], train=True)[0]

    report = jamp.report(logits_of, params, policy=policy)
    run = Run(
        model=name,
        policy=policy,
        accuracy=float((predicted == data[3]).mean()),
        losses=losses,
        scales=scales,
        half_share=report.gradient.share,
        residual_bytes=sum(report.residual_bytes.values()),
        skipped=int(state[2].skipped),
    )
    return run, lambda: jax.block_until_ready(step(state, *batch))


def median_seconds(steps: list[Callable], rounds: int = 50) -> list[float]:
    """Times steps in turn, so that whatever else the machine is doing hits all of them alike."""
    seconds = [[] for _ in steps]
    for _ in range(rounds):
        for step, times in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def run_all(models, specs, data, epochs: int, seed: int, console: Console) -> list[Run]:
    total = epochs * (len(data[0]) // BATCH) * len(models) * len(specs)
    runs = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        tick = functools.partial(progress.advance, task)
        for name in models:
            steps = []
            for spec in specs:
                progress.update(task, description=f"{name} {spec}")
                run, step = train(name, spec, data, epochs, seed, tick)
                runs.append(run)
                steps.append(step)
            for run, seconds in zip(runs[-len(specs) :], median_seconds(steps), strict=True):
                run.step_seconds = seconds
    return runs


def main(argv: list[str] | None = None) -> list[Run]:
    parser = Parser(prog="digits.py", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=policy_or_all, default="all", help="one policy, beside O0 (default: all)")
    parser.add_argument("--model", choices=("all", *MODELS), default="all")
    parser.add_argument("--epochs", type=positive_int, default=20)
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--out", type=png_path, default="out/digits.png", help="where the picture goes (a PNG file)")
    parser.add_argument("--table", type=text_path, help="where to write the table as Markdown too (default: nowhere)")
    args = parser.parse_args(argv)
    models = MODELS if args.model == "all" else (args.model,)
    specs = POLICIES if args.policy == "all" else dict.fromkeys(("O0", args.policy))
    console = Console()
    runs = run_all(tuple(models), tuple(specs), load_data(), args.epochs, args.seed, console)
    console.print(table(runs))
    plot(runs, args.out)
    if args.table:
        args.table.write_text(markdown(runs) + "\n")
    console.print(f"Loss and loss-scale curves: {args.out}")
    return runs


if __name__ == "__main__":
    main()
