"""Adam with its state in bfloat16, float8 and int8 beside Adam in float32: losses, long runs, and errors of the codes.

    python -m benchmarks.studies.optimizer_states [--seeds 5] [--steps 2000] [--long 10000] [--tasks lstm]

The tasks are those of the examples: a GPT and an LSTM on real text, and an MLP on handwritten digits, all in float32,
so that nothing but the stored state differs. A seed decides about the initial weights and the order of the data.
Rounding makes two runs part ways whatever it is, and how far depends on its size. So two more float32 runs show how
far chance alone moves the loss: one starts from weights that are changed in their last bits, and of the other each
update is multiplied by a random number around 1, as far from it as 8 bits take an update. States in int8 are rounded
with the draws of two keys.

Each stored run carries all that it depends on. One that the file has already is left out, and runs with other settings
lie beside it, so that the file can be made in pieces and loses nothing.
"""

import argparse
import itertools
import json
import statistics
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks.files import RESULTS, ROOT, write_json
from benchmarks.tables import print_table
from jamp.optim._block_codes import decode_blocks, encode_blocks, scales_shape

sys.path.insert(0, str(ROOT / "examples"))

import digits
import language_models

CHANGED_UPDATES = "float32, updates changed by 2 %"
OTHER_DRAWS = "int8, other draws"
STATES = ("float32", "int8", OTHER_DRAWS, "bfloat16", "float8", "float32, last bits changed", CHANGED_UPDATES)
LONG_STATES = ("float32", "int8", "bfloat16", "float8")
TASKS = ("gpt", "lstm", "digits")
MEASURES = ("held-out loss", "mean loss", "accuracy")
# What runs share that are compared with one another. Those on the digits have no text, and a batch size of their own.
SETTINGS = ("task", "steps", "schedule", "device", "jax", "text", "batch", "size")
CHUNK = 100  # Steps in one call.


def optimizer(state: str, learning_rate: Any) -> optax.GradientTransformation:
    """Adam, its state stored as the name says; all matrices of these small models are to be."""
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
    if state == CHANGED_UPDATES:
        return optax.chain(adam, changed_at_random(0.02))
    if state.startswith("float32"):
        return adam
    # On a CPU, drawing from this generator takes a fraction of the time of the default's.
    key = jax.random.key(int(state == OTHER_DRAWS), impl="rbg")
    return jamp.low_precision_state(adam, state.partition(",")[0], key=key, min_size=1024)


def changed_at_random(size: float) -> optax.GradientTransformation:
    """Multiplies each number of an update by `1 + size * normal`."""

    def update(updates: Any, key: jax.Array, params: Any = None) -> tuple[Any, jax.Array]:
        del params
        key, *keys = jax.random.split(key, len(jax.tree.leaves(updates)) + 1)
        keys = jax.tree.unflatten(jax.tree.structure(updates), keys)
        return jax.tree.map(lambda u, k: u * (1 + size * jax.random.normal(k, u.shape)), updates, keys), key

    return optax.GradientTransformation(lambda _: jax.random.key(0, impl="rbg"), update)


def language_task(name: str, args: argparse.Namespace, seed: int) -> tuple[Any, Callable, Callable, Callable]:
    """Initial parameters, loss function, batches, and what is measured at the end."""
    text, held_out = language_models.load_text()
    model, rng = language_models.MODELS[name](args.size), np.random.default_rng(seed)
    params = jax.jit(model.init)(jax.random.key(seed), held_out[:1, :-1])
    loss_fn = language_models.make_loss_fn(model, "O0")
    measure = lambda params: {"held-out loss": float(jax.jit(loss_fn)(params, held_out))}  # noqa: E731
    return params, loss_fn, lambda: language_models.sample(text, rng, args.batch), measure


def digits_task(name: str, args: argparse.Namespace, seed: int) -> tuple[Any, Callable, Callable, Callable]:
    """The same for the MLP on digits."""
    x, y, x_test, y_test = digits.load_data()
    sizes, init = (64, 128, 128, 10), jax.nn.initializers.he_uniform()
    keys = jax.random.split(jax.random.key(seed), 3)
    params = [{"w": init(k, (i, o)), "b": jnp.zeros(o)} for k, i, o in zip(keys, sizes[:-1], sizes[1:], strict=True)]

    def loss_fn(params, batch):
        logits, _ = digits.mlp(params, None, batch[0], train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def measure(params):
        logits, _ = digits.mlp(params, None, x_test, train=False)
        accuracy = float((logits.argmax(-1) == y_test).mean())
        return {"held-out loss": float(loss_fn(params, (x_test, y_test))), "accuracy": accuracy}

    return params, loss_fn, digits.batches(x, y, sys.maxsize, seed).__next__, measure


def train(task: str, state: str, args: argparse.Namespace, seed: int, steps: int, decay: bool) -> dict[str, Any]:
    """Trains once; returns what was measured, and the first step whose loss was not finite, if there was one."""
    make = digits_task if task == "digits" else language_task
    params, loss_fn, batch, measure = make(task, args, seed)
    if state.endswith("last bits changed"):
        noise = np.random.default_rng(0)
        params = jax.tree.map(lambda p: p * (1 + 1e-6 * noise.standard_normal(p.shape, np.float32)), params)
    rate = 1e-3 if task == "digits" else 3e-3
    tx = optimizer(state, optax.cosine_decay_schedule(rate, steps) if decay else rate)

    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    many_steps = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches))
    carry, losses = (params, jax.jit(tx.init)(params)), []
    for start in range(0, steps, CHUNK):
        batches = [batch() for _ in range(min(CHUNK, steps - start))]
        carry, found = many_steps(carry, jax.tree.map(lambda *leaves: np.stack(leaves), *batches))
        losses.extend(found)
    params = carry[0]
    losses = np.array(jax.device_get(losses))
    bad = np.flatnonzero(~np.isfinite(losses))
    measured = {"mean loss": float(losses.mean())} | measure(params)
    return measured | {"first step not finite": int(bad[0]) if len(bad) else None}


def dettmers_table(signed: bool) -> np.ndarray:
    """The 256 values of the data type of Dettmers et al.: a decimal exponent in unary, and a linear fraction."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        means = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*means, *(-means if signed else ())]
    return np.sort(values)


def through_table(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Each value replaced by the nearest in the table, times the largest magnitude in its row."""
    scales = np.abs(x).max(-1, keepdims=True)
    scales = np.where(scales == 0, 1, scales)
    return table[np.searchsorted((table[1:] + table[:-1]) / 2, x / scales)] * scales


def through_codes(x: np.ndarray, dtype: str, seed: int = 0) -> np.ndarray:
    """Each value encoded and decoded by jamp, in blocks of 256."""
    stored = np.dtype(jnp.float8_e4m3fn if dtype == "float8" else dtype)
    codes, scales = encode_blocks(jnp.asarray(x), jax.random.key(seed), stored, scales_shape(x.shape, 256))
    return np.asarray(decode_blocks(codes, scales), np.float64)


def code_errors(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What storing one moment of Adam does to the update `m / (sqrt(v) + 1e-8)`, for a GPT in training."""
    params, loss_fn, batch, _ = language_task("gpt", args, 0)
    tx = optax.adam(3e-3)
    step = jax.jit(lambda p, s, b: tx.update(jax.grad(loss_fn)(p, b), s, p))
    state = tx.init(params)
    for _ in range(300):
        updates, state = step(params, state, batch())
        params = optax.apply_updates(params, updates)
    # Rows of up to 256, so that a row is a block for everybody.
    pairs = zip(jax.tree.leaves(state[0].mu), jax.tree.leaves(state[0].nu), strict=True)
    pairs = [[np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in p] for p in pairs if p[0].size >= 1024]
    linear = lambda x: through_table(x, np.arange(-127, 128) / 127)  # noqa: E731
    linear_unsigned = lambda x: through_table(x, np.arange(256) / 255)  # noqa: E731
    ways = {
        ("first", "linear"): linear,
        ("first", "Dettmers et al."): lambda x: through_table(x, dettmers_table(True)),
        ("first", "jamp int8"): lambda x: through_codes(x, "int8"),
        ("first", "jamp float8"): lambda x: through_codes(x, "float8"),
        ("second", "linear"): linear_unsigned,
        ("second", "linear, of the root"): lambda x: linear_unsigned(np.sqrt(x)) ** 2,
        ("second", "Dettmers et al."): lambda x: through_table(x, dettmers_table(False)),
        ("second", "jamp int8"): lambda x: through_codes(x, "int8"),
        ("second", "jamp float8"): lambda x: through_codes(x, "float8"),
    }
    rows = []
    for (moment, code), way in ways.items():
        error = exact = lost = 0.0
        for m, v in pairs:
            stored_m, stored_v = (way(m), v) if moment == "first" else (m, way(v))
            true = m / (np.sqrt(v) + 1e-8)
            error += ((stored_m / (np.sqrt(stored_v) + 1e-8) - true) ** 2).sum()
            exact += (true**2).sum()
            lost += ((stored_v == 0) & (v > 0)).sum() / sum(v.size for _, v in pairs)
        rows.append({"moment": moment, "code": code, "error": float(np.sqrt(error / exact)), "zeroed": float(lost)})
    return rows


def environment(task: str, args: argparse.Namespace) -> dict[str, Any]:
    """What results of a task depend on, beside the steps. The text is that of the Python which runs this."""
    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    if task == "digits":
        return found
    text, held_out = language_models.load_text()
    return found | {"text": f"{zlib.crc32(held_out, zlib.crc32(text)):08x}", "batch": args.batch, "size": args.size}


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For runs of the same settings the mean over seeds, and how many percent it is off float32's, seed by seed."""
    groups: dict[tuple, list] = {}
    for run in runs:
        groups.setdefault(tuple((key, run[key]) for key in SETTINGS if key in run), []).append(run)
    rows = []
    for settings, group in groups.items():
        for measure, state in itertools.product(MEASURES, STATES):
            by_seed = {(run["state"], run["seed"]): run[measure] for run in group if measure in run}
            seeds = [seed for s, seed in by_seed if s == state and ("float32", seed) in by_seed]
            if not seeds:
                continue
            off = [100 * (by_seed[state, s] / by_seed["float32", s] - 1) for s in seeds]
            row = dict(settings) | {"measure": measure, "state": state, "seeds": len(seeds)}
            row["mean"] = statistics.mean(by_seed[state, s] for s in seeds)
            row["difference in percent"] = statistics.mean(off)
            row["deviation in percent"] = statistics.stdev(off) if len(off) > 1 else None
            rows.append(row)
    return rows


def load(path: Path) -> dict[str, Any]:
    """All that the file has, and empty lists of what it does not have yet."""
    return {"codes": [], "summary": [], "runs": []} | (json.loads(path.read_text()) if path.exists() else {})


def measure_once(
    path: Path, part: str, settings: dict[str, Any], measure: Callable[[], dict[str, Any] | list[dict[str, Any]]]
) -> None:
    """Measures and stores what the file has no row of these settings for.

    The file is read again before rows are added to it: another process may have stored others in the meantime.
    """
    if any(settings.items() <= row.items() for row in load(path)[part]):
        return
    found = measure()
    stored = load(path)
    stored[part] += [settings | row for row in (found if isinstance(found, list) else [found])]
    write_json(path, stored | {"summary": summarize(stored["runs"])})
    jax.clear_caches()


def train_once(path: Path, args: argparse.Namespace, task: str, state: str, seed: int, schedule: str) -> None:
    """Trains for as long as the schedule is asked for, unless the file has this run."""
    steps = args.steps if schedule == "cosine" else args.long
    settings = {"task": task, "state": state, "seed": seed, "steps": steps, "schedule": schedule}
    settings |= environment(task, args)
    measure_once(path, "runs", settings, lambda: train(task, state, args, seed, steps, schedule == "cosine"))


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows, with a column for each key that one of them has."""
    keys = dict.fromkeys(key for row in rows for key in row)
    cells = [[row.get(key, "") for key in keys] for row in rows]
    print_table(title, list(keys), [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in cells])


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.optimizer_states", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--long", type=int, default=10_000, help="steps of the runs that are watched for NaNs; 0 for none"
    )
    parser.add_argument("--batch", type=int, default=4, help="of the language models")
    parser.add_argument("--size", type=int, default=32, help="width of the language models")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=("digits", "gpt"))
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    parser.add_argument("--out", type=Path, default=RESULTS / "optimizer_states.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measures what the file does not have, stores it after every run, and prints the tables."""
    args = parse(argv)
    measure_once(args.out, "codes", environment("gpt", args), lambda: code_errors(args))
    for task in args.tasks:
        for seed, state in itertools.product(range(args.seeds), args.states):
            train_once(args.out, args, task, state, seed, "cosine")
        for state in args.states if args.long else ():
            if state in LONG_STATES:  # At a constant rate: the decay would hide what grows.
                train_once(args.out, args, task, state, 0, "constant")
    stored = load(args.out)
    not_finite = [run for run in stored["runs"] if run["first step not finite"] is not None]
    tables = {part: stored[part] for part in ("codes", "summary")} | {"runs whose loss was not finite": not_finite}
    for title, rows in tables.items():
        if rows:
            print_rows(title, rows)
    return stored


if __name__ == "__main__":
    main()
