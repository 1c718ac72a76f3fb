"""One script on one device, on several, and on several processes: all of them skip together, and none drifts.

    python examples/distributed.py                  # one device
    python examples/distributed.py --devices 8      # eight devices, made of one CPU
    python examples/distributed.py --processes 4    # four processes on this machine, which talk through gloo

The batch is split over all devices, and half-way through the last device gets a target that is infinite. The train
step does not know of any of this: under `jax.jit` the gradients, and so the decision to skip, are global.
"""

import argparse
import hashlib
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import Parser, policy, positive_int
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import jamp


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=positive_int, default=1, help="devices of each process, made of one CPU")
    parser.add_argument("--processes", type=positive_int, default=1, help="processes to start on this machine")
    parser.add_argument("--steps", type=positive_int, default=60)
    parser.add_argument("--policy", type=policy, default="O2:float16", help="for instance O0, O2:float16, O3:bfloat16")
    parser.add_argument("--join", nargs=2, help=argparse.SUPPRESS)  # Address and rank, for the processes it starts.
    return parser.parse_args()


def main():
    args = parse_args()
    if args.processes > 1 and args.join is None:
        sys.exit(start_processes(args.processes))

    # Both count when JAX first looks for devices, which importing it does not do. The variable JAX_PLATFORMS is read by
    # the import, at the top of this file. Of a flag that is given twice, XLA takes the last.
    jax.config.update("jax_platforms", "cpu")
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={args.devices}"]
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    if args.join is not None:
        address, rank = args.join
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, args.processes, int(rank))
    report(*train(args.policy, args.steps))


def start_processes(count: int) -> int:
    """Runs this script once for each rank, and returns the worst exit code."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, str(pathlib.Path(__file__)), *sys.argv[1:], "--join", address]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(count)]
    return max(abs(rank.wait()) for rank in ranks)


def train(policy: str, steps: int):
    """Trains a small network on all devices of all processes; returns its parameters, metrics and losses."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    policy = jamp.get_policy(policy)
    rng = np.random.default_rng(0)  # Every rank draws the same numbers, and gives its devices their part of them.
    params = {"w1": rng.normal(size=(16, 64)) / 4, "w2": rng.normal(size=(64, 1)) / 8}
    params = jax.device_put(policy.cast_to_param(jax.tree.map(np.float32, params)), everywhere)
    tx = jamp.mixed_precision(optax.adamw(3e-3), policy)
    opt_state = jax.jit(tx.init, out_shardings=everywhere)(params)
    model = jamp.cast_fn(lambda params, x: jnp.tanh(x @ params["w1"]) @ params["w2"], policy)

    @jax.jit
    def train_step(params, opt_state, x, y):
        def loss_fn(params):
            return ((model(params, x) - y) ** 2).mean()

        loss, grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for step in range(steps):
        x = rng.normal(size=(32 * jax.device_count(), 16)).astype(np.float32)
        y = np.sin(x.sum(axis=1, keepdims=True))
        if step == steps // 2:
            y[-1] = np.inf
        batch = (jax.make_array_from_callback(a.shape, split, a.__getitem__) for a in (x, y))
        params, opt_state, loss = train_step(params, opt_state, *batch)
        losses.append(float(loss))
    return params, jamp.metrics(opt_state), losses


def report(params, metrics, losses):
    """Prints what became of the parameters on each device; the first process does it for all."""

    def fingerprint(device) -> int:
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(params):
            digest.update(next(s.data for s in leaf.addressable_shards if s.device == device).tobytes())
        return int.from_bytes(digest.digest()[:4], "little")

    mine = [(d.process_index, d.id, fingerprint(d)) for d in jax.local_devices()]
    rows = multihost_utils.process_allgather(np.array(mine, np.uint32), tiled=True)
    if jax.process_index() == 0:
        table = Table("process", "device", "fingerprint of its parameters")
        for process, device, digest in rows:
            table.add_row(str(process), str(device), f"{digest:08x}")
        console = Console()
        console.print(table)
        console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, steps {len(losses)}, skipped {metrics['skipped']}, "
                      f"loss scale {metrics['loss_scale']:.0f}")  # fmt: skip
        same = len({digest for _, _, digest in rows}) == 1
        console.print("All parameters are the same, bit for bit." if same else "[red]The parameters differ.")
        sys.exit(not same)


if __name__ == "__main__":
    main()
