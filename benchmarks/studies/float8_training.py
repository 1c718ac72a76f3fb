"""Trains digits, or a small language model, at float32, bfloat16 and float8, from several seeds: how the loss moves.

    python -m benchmarks.studies.float8_training --json benchmarks/results/float8-training.json
    python -m benchmarks.studies.float8_training --task gpt --seeds 3 --json benchmarks/results/float8-training-gpt.json
    python -m benchmarks.studies.float8_training --task lstm --seeds 3 --only float32 --only bfloat16 --only float8 \\
        --json benchmarks/results/float8-training-lstm.json

The model is the MLP of `examples/digits.py`, or the GPT or the LSTM of `examples/language_models.py`, with Adam, and
runs of a seed share the initial weights and the order of the data. Rounding makes two runs part ways whatever it is: so
one more float32 run of the digits starts from weights that are changed in their last bits, and shows how far that alone
moves the loss.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks.files import write_json
from benchmarks.tables import print_table

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import digits
import language_models

BATCH = 128  # Of which the large products are in float8.
FLOAT8 = "O2:bfloat16,matmul=float8"
CANDIDATES = {
    "float32": "O0",
    "float32, last bits changed": "O0",
    "bfloat16": "O2:bfloat16",
    "float8": FLOAT8,
    "float8, gradients in E5M2": f"{FLOAT8},grad_dtype=e5m2",
    "float8, scales by row": f"{FLOAT8},float8_scales=row",
    "float8, gradients of weights in half": f"{FLOAT8},weight_grad=half",
    "mxfp8": "O2:bfloat16,matmul=mxfp8",
}


def orders(length: int, steps: int, seeds: int) -> np.ndarray:
    """Indices of the batches, of shape `(steps, seeds, BATCH)`, shuffled in each epoch."""
    each = length // BATCH
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        epochs = [rng.permutation(length)[: each * BATCH].reshape(each, BATCH) for _ in range(-(-steps // each))]
        found.append(np.concatenate(epochs)[:steps])
    return np.stack(found, axis=1)


def trained(name: str, data: Any, steps: int, seeds: int) -> dict[str, list[float]]:
    """Losses and accuracies after training from each seed at one candidate; all seeds at once, each as if alone."""
    images, labels, test_images, test_labels = map(jnp.asarray, data)
    apply = jamp.cast_fn(functools.partial(digits.mlp, train=True), CANDIDATES[name])
    tx = optax.adam(optax.cosine_decay_schedule(1e-3, steps))

    def loss_of(params: Any, images: Any, labels: Any) -> jax.Array:
        logits, _ = apply(params, None, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, images[batch], labels[batch])
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def run(seed: jax.Array, batches: jax.Array) -> Any:
        params, _ = digits.init_mlp(jax.random.key(seed))
        if "changed" in name:
            params = jax.tree.map(lambda x: x * (1 + 2.0**-22), params)
        (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), batches)
        logits, _ = digits.mlp(params, None, test_images, train=False)  # In float32, whatever it was trained at.
        held_out = optax.softmax_cross_entropy_with_integer_labels(logits, test_labels).mean()
        return losses[-len(images) // BATCH :].mean(), held_out, (logits.argmax(-1) == test_labels).mean()

    batches = orders(len(images), steps, seeds)
    found = jax.jit(jax.vmap(run, in_axes=(0, 1)))(jnp.arange(seeds), batches)
    return dict(zip(("train loss", "held-out loss", "accuracy"), (np.asarray(x).tolist() for x in found), strict=True))


def trained_on_text(model: Any, batch: int, name: str, data: Any, steps: int, seeds: int) -> dict[str, list[float]]:
    """The same of a language model on bytes of source code, one seed after the other."""
    text, held_out = data
    found: dict[str, list[float]] = {"train loss": [], "held-out loss": []}
    for seed in range(seeds):
        losses, loss = language_models.train(model, CANDIDATES[name], text, held_out, steps, seed, lambda: None, batch)
        found["train loss"].append(float(np.mean(losses[-20:])))
        found["held-out loss"].append(loss)
    return found


# An LSTM multiplies a batch of rows at a time, and products of less than 64 stay half.
GPT = functools.partial(trained_on_text, language_models.GPT(64), language_models.BATCH)
LSTM = functools.partial(trained_on_text, language_models.LSTM(128), BATCH)
TASKS = {
    "digits": (digits.load_data, trained),
    "gpt": (language_models.load_text, GPT),
    "lstm": (language_models.load_text, LSTM),
}


def main() -> None:
    """Trains, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.float8_training", description=__doc__)
    parser.add_argument("--task", choices=list(TASKS), default="digits")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", action="append", default=[], choices=list(CANDIDATES), help="may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    load, train = TASKS[options.task]
    data = load()
    settings = {"task": options.task, "steps": options.steps, "seeds": options.seeds}
    runs: dict[str, dict[str, list[float]]] = {}
    alike = [name for name in CANDIDATES if options.task == "digits" or "changed" not in name]
    for name in options.only or alike:
        runs[name] = train(name, data, options.steps, options.seeds)
        print(name, {key: float(np.mean(values)) for key, values in runs[name].items()}, flush=True)
        if options.json:
            write_json(options.json, {"jax": jax.__version__, "settings": settings, "runs": runs})
    print_results(options.task, runs)


def print_results(task: str, runs: dict[str, dict[str, list[float]]]) -> None:
    """Prints a row for each candidate: the change of the loss, on the mean over seeds, and the largest of a seed."""
    base = np.asarray(runs["float32"]["held-out loss"])
    lines = []
    for name, run in runs.items():
        losses = np.asarray(run["held-out loss"])
        moved = losses / base - 1
        lines.append(
            (
                name, f"{losses.mean():.4f}", f"{losses.mean() / base.mean() - 1:+.2%}", f"{abs(moved).max():.2%}",
                f"{np.mean(run['accuracy']):.2%}" if "accuracy" in run else "",
            )
        )  # fmt: skip
    headings = ("trained in", "held-out loss", "of the mean", "at most, of a seed", "accuracy")
    print_table(f"{task}: the mean over seeds", headings, lines)


if __name__ == "__main__":
    main()
