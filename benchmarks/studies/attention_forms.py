"""Forms of attention on the device at hand: does its kernel run, how wrong are its gradients, how long does it take.

Run from the root of the repository, on a machine with a GPU::

    python -m benchmarks.studies.attention_forms --json benchmarks/results/attention-forms.json

Each form is written in plain JAX and cast by O2 and by O2 with `attention=fused`. Errors are root mean squares of
differences to float64, over those of the gradients themselves; the largest of the value's and the operands'.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jamp
from benchmarks.files import OUT, write_json
from benchmarks.tables import message, number, print_table
from benchmarks.timing import milliseconds

Mask = Callable[[int, int], np.ndarray]  # Of numbers of queries and keys: `bool[batch or 1, queries, keys]`.
POLICIES = ("O2:{half}", "O2:{half},attention=fused")
KERNEL = "__cudnn$fmha"  # What XLA calls it, in a compiled program.


class Form(NamedTuple):
    """An attention of `[batch, length, heads, features]`.

    Attributes:
        mask: Which keys each query sees, of places.
        given: Which of the data it is given: "keys" that are padding, "packed" sequences, padding on the "left".
        biased: Whether a bias of each head is added to the scores, and trained.
        fewer: How many queries there are less than keys.
        single: Whether there is one query alone.
        short: How many there are less of both than the length that is asked for.
        groups: How many heads read the same keys.
        features: Of a head.
        added: What is added to scores of keys that are not seen, where they are not replaced.
    """

    mask: Mask | None = None
    given: str = ""
    biased: bool = False
    fewer: int = 0
    single: bool = False
    short: int = 0
    groups: int = 1
    features: int = 64
    added: float = 0.0


def causal(queries: int, keys: int) -> np.ndarray:
    """A query sees the keys up to its own, the last of them that of the last query."""
    return np.tri(queries, keys, keys - queries, dtype=bool)[None]


def window(queries: int, keys: int) -> np.ndarray:
    """A query sees its own key and the 64 in front of it."""
    return causal(queries, keys) & ~np.tri(queries, keys, keys - queries - 65, dtype=bool)


FORMS: Mapping[str, Form] = {
    "all keys": Form(),
    "causal": Form(causal),
    "causal, an odd length": Form(causal, short=1),
    "odd numbers of keys alone": Form(fewer=1, short=1),
    "one query": Form(single=True),
    "fewer queries, causal": Form(causal, fewer=64),
    "window": Form(window),
    "padding": Form(given="keys"),
    "padding, causal, odd": Form(causal, given="keys", short=1),
    "packed, causal": Form(causal, given="packed"),
    "padding on the left, causal": Form(causal, given="left"),
    "padding on the left, odd, bias": Form(causal, given="left", short=1, biased=True),
    "bias": Form(biased=True),
    "bias, causal, odd": Form(causal, biased=True, short=1),
    "bias, padding": Form(given="keys", biased=True),
    "grouped queries, causal": Form(causal, groups=4),
    "heads of 128, causal": Form(causal, features=128),
    "heads of 72": Form(features=72),
    "padding, -1e9 added": Form(given="keys", added=-1e9),
    "padding on the left, causal, -10,000 added": Form(causal, given="left", added=-1e4),
    "padding on the left, bias, -10,000 added": Form(causal, given="left", biased=True, added=-1e4),
}


def attention(form: Form, q: Array, k: Array, v: Array, bias: Array, marks: Array) -> Array:
    """The attention as models write it, of operands that they compute."""
    q, k, v = q * 1.0, k * 1.0, v * 1.0
    heads = q.shape[2] // form.groups
    q = q.reshape(*q.shape[:2], heads, form.groups, q.shape[-1])
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) / np.sqrt(q.shape[-1])
    if form.biased:
        scores = scores + bias.reshape(heads, form.groups, *scores.shape[-2:])
    seen = None if form.mask is None else jnp.asarray(form.mask(*scores.shape[-2:]))
    if form.given:
        of_queries, of_keys = marks[:, -scores.shape[-2] :, None], marks[:, None]
        more = of_queries == of_keys if form.given == "packed" else of_keys != 0
        seen = more if seen is None else seen & more
    if seen is not None and form.added:
        scores = scores + form.added * (1 - seen[:, None, None].astype(scores.dtype))
    elif seen is not None:
        scores = jnp.where(seen[:, None, None], scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores), v)


def drawn(form: Form, batch: int, length: int, heads: int, seed: int = 0) -> list[np.ndarray]:
    """Operands of a form: queries, keys, values, bias, marks of places, and the cotangent of its result."""
    rng = np.random.default_rng(seed)
    keys = length - form.short
    queries = 1 if form.single else keys - form.fewer
    few = heads // form.groups
    shapes = [(batch, queries, heads, form.features), *[(batch, keys, few, form.features)] * 2, (heads, queries, keys)]
    operands = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    places, ends = np.arange(keys)[None], rng.integers(keys // 2, keys, (batch, 1))
    marks = {"packed": 1 + (places > ends), "left": places >= keys - ends, "": np.ones((batch, 1))}
    marks = marks.get(form.given, places < ends).astype(np.int32)
    cotangent = rng.standard_normal((batch, queries, few, form.groups, form.features)).astype(np.float32)
    return [*operands, marks, cotangent]


def derived(form: Form, policy: str | None) -> Callable[..., tuple[Array, ...]]:
    """The value of a form and its gradients, of what `drawn` draws."""
    written = functools.partial(attention, form)
    function = written if policy is None else jamp.cast_fn(written, policy)

    def run(q: Array, k: Array, v: Array, bias: Array, marks: Array, cotangent: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(lambda *operands: function(*operands, marks), q, k, v, bias)
        return (out, *pull(cotangent.astype(out.dtype))[: 4 if form.biased else 3])

    return run


def compiled(form: Form, draw: list[np.ndarray], half: str, exact: bool = True) -> dict[str | None, Any]:
    """The program by policy, and in float64 if it is to be exact too."""
    found: dict[str | None, Any] = {}
    if exact:
        with jax.enable_x64(True):
            found[None] = jax.jit(derived(form, None)).lower(*_wide(draw)).compile()
    for policy in POLICIES:
        found[policy.format(half="half")] = jax.jit(derived(form, policy.format(half=half))).lower(*draw).compile()
    return found


def _wide(draw: list[np.ndarray]) -> list[np.ndarray]:
    return [x.astype(np.float64) if x.dtype == np.float32 else x for x in draw]


def errors(programs: dict[str | None, Any], draw: list[np.ndarray]) -> dict[str, Any]:
    """By policy: whether a kernel ran, and the relative error of the value and of each gradient."""
    with jax.enable_x64(True):
        exact = [np.asarray(x) for x in programs[None](*_wide(draw))]
    found = {}
    for name, program in programs.items():
        if name is None:
            continue
        got = [np.asarray(x, np.float64) for x in program(*draw)]
        each = [
            float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))) if b.any() else float(np.abs(a).max())
            for a, b in zip(got, exact, strict=True)
        ]
        found[name] = {"kernel": KERNEL in program.as_text(), "errors": each}
    return found


def costs(programs: dict[str, Any], draw: list[np.ndarray]) -> dict[str, float]:
    """By policy: milliseconds of the value with its gradients, and the temporary memory in MB."""
    arguments, found = jax.device_put(draw), {}
    for name, program in programs.items():
        found[name] = milliseconds(program, arguments)
        found[f"{name}, temporary MB"] = program.memory_analysis().temp_size_in_bytes / 1e6
    return found


def guarded(function: Callable[..., Any], *operands: Any) -> Any:
    """What a function returns, or what it said where it failed: a kernel that is not there is a result."""
    try:
        return function(*operands)
    except Exception as error:
        return message(error)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.attention_forms", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="forms with one of these in their name")
    parser.add_argument("--length", type=int, default=256, help="queries and keys where errors are measured")
    parser.add_argument("--time", type=int, default=0, metavar="LENGTH", help="time forms of this length too")
    parser.add_argument("--json", type=Path, default=OUT / "attention-forms.json")
    options = parser.parse_args()
    forms = {name: form for name, form in FORMS.items() if any(text in name for text in options.only)}
    stored: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {"forms": {}}
    stored |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 2)) as pool:
        waiting = {
            (name, half): pool.submit(guarded, compiled, form, drawn(form, 2, options.length, 4), half)
            for name, form in forms.items()
            for half in ("bfloat16", "float16")
        }
        timed = {
            name: pool.submit(guarded, compiled, form, drawn(form, 8, options.time, 12), "bfloat16", False)
            for name, form in (forms.items() if options.time else ())
        }
    # Nothing runs while something compiles: a kernel that is tried out breaks a graph that is captured.
    for (name, half), future in waiting.items():
        found, draw = future.result(), drawn(forms[name], 2, options.length, 4)
        row = found if isinstance(found, str) else guarded(errors, found, draw)
        if half == "bfloat16":
            stored["forms"][name] = {}
        stored["forms"][name][half] = row
        write_json(options.json, stored)
    for name, future in timed.items():
        found = future.result()
        row = found if isinstance(found, str) else guarded(costs, found, drawn(forms[name], 8, options.time, 12))
        stored["forms"][name]["ms"] = row
        write_json(options.json, stored)
    show(stored)


def show(stored: dict[str, Any]) -> None:
    """Prints a row for each form, and what failed below."""
    lines, failures = [], []
    names = [policy.format(half="half") for policy in POLICIES]
    for form, found in stored["forms"].items():
        line = [form]
        for half in ("bfloat16", "float16"):
            if isinstance(found[half], str):
                failures.append(f"{form}, {half}: {found[half]}")
                line += ["", "", ""]
                continue
            written, fused = (found[half][name] for name in names)
            line += ["yes" if fused["kernel"] else "no", number(max(written["errors"]), 100, 3)]
            line.append(number(max(fused["errors"]), 100, 3))
        ms = found.get("ms", {})
        if isinstance(ms, str):
            failures.append(f"{form}, timed: {ms}")
            ms = {}
        for suffix in ("", ", temporary MB"):
            line += [number(ms.get(name + suffix), digits=2) for name in names]
        lines.append(tuple(line))
    of_half = ("kernel", "written %", "fused %")
    titles = ("form", *(f"{half}: {title}" for half in ("bf16", "f16") for title in of_half))
    titles += ("written ms", "fused ms", "written MB", "fused MB")
    print_table(f"Attention on {stored['device']}", titles, lines)
    print("\n".join(failures))


if __name__ == "__main__":
    main()
