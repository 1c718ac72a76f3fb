"""What the examples share: a command line that answers in one line, training text, and a smoothed curve."""

import argparse
import pathlib
import sysconfig
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

import jamp

POLICIES = "O0, OD, O1, O2, O3 or auto, each with :float16 or :bfloat16 after it if you like"


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a wrong value with one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def policy(text: str) -> str:
    """Checks a `--policy` value: any string that `jamp.get_policy` takes."""
    try:
        jamp.get_policy(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"unknown policy {text!r}: expected {POLICIES}") from None
    return text


def policy_or_all(text: str) -> str:
    """Checks a `--policy` value that may also be `all`."""
    try:
        return text if text == "all" else policy(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or all") from None


def positive_int(text: str) -> int:
    """Checks a value that counts something: steps, epochs, sizes."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def seed(text: str) -> int:
    """Checks a `--seed` value: what both `jax.random.key` and numpy's generator take."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**32 - 1, got {text!r}")
    return int(text)


def png_path(text: str) -> pathlib.Path:
    """Checks an `--out` value: a PNG file in a folder that exists or can be made."""
    return _path(text, ".png")


def text_path(text: str) -> pathlib.Path:
    """Checks a value that names a Markdown file."""
    return _path(text, ".md")


def weights_path(text: str) -> pathlib.Path:
    """Checks a value that names a file of weights, as `flax.serialization.to_bytes` writes them."""
    return _path(text, ".msgpack")


def _path(text: str, suffix: str) -> pathlib.Path:
    path = pathlib.Path(text)
    if path.suffix != suffix or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected the name of a file that ends in {suffix}, got {text!r}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make the folder {str(path.parent)!r}: {error.strerror}") from None
    return path


def scaler_for(policy: jamp.Policy, scaler: Any) -> Any:
    """Returns `scaler` where the policy computes in float16, and no scaling in float32 and bfloat16.

    float16's smallest positive value is 6e-8, and gradients below it are lost. bfloat16 has float32's exponent range.
    """
    return scaler if policy.compute_dtype == jnp.float16 else jamp.NoOpLossScale()


def source_text(max_bytes: int) -> np.ndarray:
    """Returns the Python standard library's own source files as one array of bytes: text that every machine has."""
    paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in paths)[:max_bytes]
    return np.frombuffer(text, np.uint8)


def smooth(values: list[float], decay: float = 0.9) -> list[float]:
    """Returns the exponential moving average; the loss of single batches hides the trend."""
    smoothed, average = [], values[0]
    for value in values:
        average = decay * average + (1 - decay) * value
        smoothed.append(average)
    return smoothed


def line_style(policy: jamp.Policy) -> dict[str, Any]:
    """Returns a color a level and a dash a dtype; curves lie on one another, so float32's is a broad band."""
    if policy.compute_dtype == jnp.float32:
        return {"color": "0.8", "linewidth": 6}
    color = {"O1": "tab:blue", "O2": "tab:orange", "O3": "tab:green"}.get(policy.level, "tab:red")
    return {"color": color, "linewidth": 1.2, "linestyle": "-" if policy.compute_dtype == jnp.float16 else ":"}
