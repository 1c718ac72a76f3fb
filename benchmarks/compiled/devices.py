"""Devices that XLA compiles for on any machine. The environment has to be set before JAX is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Without the autotuning of a GPU, XLA runs nothing to compile. What a TPU's runtime asks its surroundings is answered.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}

from jax.experimental import topologies

# What XLA asks a device about itself, as it prints it for an H100 SXM.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclass(frozen=True)
class Device:
    """A device to compile for.

    Attributes:
        name: What it is called.
        install: The package whose compiler it needs.
        describe: Makes JAX's description of it; raises where the compiler is not installed.
    """

    name: str
    install: str
    describe: Callable[[], Any]


def _h100() -> Any:
    return topologies.get_topology_desc(platform="cuda", target_config=_H100, topology="1x1x1").devices[0]


def _tpu() -> Any:
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]


DEVICES = {
    "h100": Device("NVIDIA H100", "jax[cuda12]", _h100),
    "tpu": Device("TPU v5e", "jax[tpu]", _tpu),
}


def descriptions(names: list[str] | None) -> dict[str, Any]:
    """Returns the devices that were asked for, or those whose compilers are installed, with why one is missing."""
    found, missing = {}, []
    for name in names or DEVICES:
        try:
            found[name] = DEVICES[name].describe()
        except Exception as error:  # Whatever JAX raises, there is no compiler.
            missing.append(f'{name}: {str(error).splitlines()[0]} Write `pip install "{DEVICES[name].install}"`.')
    if missing and (names or not found):
        raise SystemExit("\n".join(missing))
    return found
