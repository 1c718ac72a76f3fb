"""Kills a training run at random moments, resumes it from its checkpoints, and compares it with an unbroken run.

    python -m benchmarks.studies.kill_resume --kills 20

The run has everything that has to survive: half-precision parameters with split masters, a dynamic loss scale that
grows and backs off, skipped steps, and Adam's moments. Checkpoints are written by orbax in the background while
training goes on, so that some of the kills (SIGKILL, which nothing can catch) hit a checkpoint that is half written.
"""

import argparse
import hashlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

STEP, DONE = "step", "done"


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.kill_resume", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--run-in", help=argparse.SUPPRESS)  # Folder of the checkpoints; for the run that gets killed.
    return parser.parse_args()


def train(steps: int, folder: str | None, every: int, pause: float = 0.0) -> str:
    """Trains, from the last checkpoint in `folder` if there is one; returns a digest of everything at the end."""
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp

    import jamp

    scale = jamp.DynamicLossScale(2.0**10, period=20)
    tx = jamp.mixed_precision(optax.adamw(1e-2), "O3:bfloat16", loss_scale=scale, storage="split")
    params = jamp.half_params({"w": jnp.eye(16), "norm": jnp.ones(16)})
    state = {"params": params, "opt_state": tx.init(params)}

    @jax.jit
    def train_step(state, step):
        def loss_fn(params):
            out = jnp.tanh(x @ params["w"].astype(jnp.float32)) * params["norm"]
            return ((out - x[:, ::-1]) ** 2).mean()

        x = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), (8, 16))
        x = jnp.where(step % 33 == 32, jnp.inf, x)  # Such a step is skipped.
        grads = jamp.scaled_value_and_grad(loss_fn, state["opt_state"])(state["params"])[1]
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    first, manager = 0, None
    if folder is not None:
        options = ocp.CheckpointManagerOptions(
            save_interval_steps=every, max_to_keep=2, enable_async_checkpointing=True
        )
        manager = ocp.CheckpointManager(folder, options=options)
        if (last := manager.latest_step()) is not None:
            state = manager.restore(last, args=ocp.args.StandardRestore(jax.eval_shape(lambda: state)))
            first = last + 1
    for step in range(first, steps):
        state = jax.block_until_ready(train_step(state, step))
        if manager is not None:
            print(STEP, step, flush=True)
            manager.save(step, args=ocp.args.StandardSave(state))
            time.sleep(pause)
    if manager is not None:
        manager.close()
    digest = hashlib.sha256(b"".join(jax.device_get(x).tobytes() for x in jax.tree.leaves(state)))
    return f"{digest.hexdigest()[:16]} (skipped {jamp.metrics(state['opt_state'])['skipped']})"


def step_of(line: str, steps: int) -> int:
    """The step that a line of a run's output speaks of: `step 12`, or `done` where it had none left."""
    return int(line.split()[1]) if line.startswith(STEP) else steps


def killed_and_resumed(args: argparse.Namespace) -> str:
    """Starts the run again and again, and kills it, `args.kills` times; then lets it finish."""
    from rich.progress import track

    moment = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(pathlib.Path(__file__)), "--run-in", folder]
        command += ["--steps", str(args.steps), "--every", str(args.every)]
        for kill in track(range(args.kills), "kills"):
            # A run ends only once its standard input does, so that on no machine it is over before it is killed.
            run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            first = last = step_of(run.stdout.readline(), args.steps)
            # An equal share of the steps left for each kill to come and for the end; then anywhere within a step.
            for _ in range(moment.randint(0, (args.steps - first) // (args.kills - kill + 1))):
                last = step_of(run.stdout.readline(), args.steps)
            time.sleep(moment.uniform(0, 0.02))
            run.send_signal(signal.SIGKILL)
            run.communicate()
            print(f"killed the run that began at step {first} after step {last}")
        end = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
        return end.stdout.split(DONE)[1].strip()


def main() -> None:
    args = parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.run_in is not None:
        print(DONE, train(args.steps, args.run_in, args.every, pause=0.002), flush=True)
        sys.stdin.read()
        return
    resumed, unbroken = killed_and_resumed(args), train(args.steps, None, args.every)
    print(f"killed {args.kills} times: {resumed}\nunbroken:        {unbroken}")
    sys.exit(resumed != unbroken)


if __name__ == "__main__":
    main()
