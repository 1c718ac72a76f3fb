"""Tables of what the studies measured, for `docs/benchmarks.md`."""

from math import isfinite
from statistics import mean, stdev
from typing import Any

from benchmarks.tables import markdown, number


def accuracy(stored: dict[str, Any]) -> str:
    """Returns the section on accuracy: `stored` is what `benchmarks.studies.accuracy` writes."""
    settings, rows = stored["settings"], stored["rows"]
    spread = {row["task"]: stdev(row["values"]) for row in rows if row["policy"] == "O0"}
    text = (
        f"## Accuracy\n\nMeans over {settings['seeds']} seeds (`python -m benchmarks.studies.accuracy`, jax "
        f"{stored['jax']}): test accuracy of the digits after {settings['epochs']} epochs, held-out loss in nats per "
        f"byte of the language models of width {settings['size']} after {settings['steps']} steps. The difference is "
        "that from the float32 run of the same seed, with its standard deviation; beside it the standard deviation of "
        "float32 itself from seed to seed."
    )
    heading = ("task", "policy", "mean", "difference from float32", "float32's own deviation")
    lines = []
    for row in rows:
        difference = f"{row['difference']:+.4f} ± {row['deviation']:.4f}" if row["policy"] != "O0" else ""
        lines.append((row["task"], row["policy"], f"{row['mean']:.4f}", difference, f"{spread[row['task']]:.4f}"))
    return text + "\n\n" + markdown(heading, lines, names=2)


def device_errors(stored: dict[str, Any]) -> str:
    """Returns the section on gradients on a device: `stored` is what `benchmarks.studies.device_errors` writes."""
    text = (
        f"## {stored['device']}: errors of gradients\n\nOf the models of the first table, in percent, on the device "
        f"itself (`python -m benchmarks.studies.device_errors`, jax {stored['jax']}), against float32 there with "
        '`jax.default_matmul_precision("highest")`. Without it, float32 products are rounded to TF32.'
    )
    names = dict.fromkeys(name for row in stored["models"].values() for name in row)
    lines = [
        (model, *(number(row.get(name), 100, 3) for name in names)) for model, row in sorted(stored["models"].items())
    ]
    return text + "\n\n" + markdown(("model", *names), lines)


def attention_forms(stored: dict[str, Any]) -> str:
    """Returns the section on forms of attention: `stored` is what `benchmarks.studies.attention_forms` writes."""
    text = (
        f"## {stored['device']}: forms of attention\n\nAs written at O2 and by cuDNN's kernel, which is what "
        "`attention=fused` takes for all but one query: the largest relative error to float64 among the result and its "
        "gradients, of `[2, 256, 4, 64]`, in percent; milliseconds of both together in bfloat16 and the memory beside "
        f"the arguments, of `[8, 1024, 12, 64]` (`python -m benchmarks.studies.attention_forms --time 1024`, jax "
        f"{stored['jax']})."
    )
    heading = ("attention", *(f"{half}: {form}" for half in ("bfloat16", "float16") for form in ("written", "fused")))
    heading += ("written ms", "fused ms", "written MB", "fused MB")
    lines = []
    for form, row in stored["forms"].items():
        errors = [max(found["errors"]) for half in ("bfloat16", "float16") for found in row[half].values()]
        times = [row.get("ms", {}).get(f"{name}{unit}") for unit in ("", ", temporary MB") for name in row["bfloat16"]]
        lines.append((form, *(number(x, 100, 3) for x in errors), *(number(x) for x in times)))
    return text + "\n\n" + markdown(heading, lines)


def float8_widths(stored: dict[str, Any]) -> str:
    """Returns the section on float8 by width: `stored` is what `benchmarks.studies.float8_widths` writes."""
    text = (
        f"## {stored['device']}: products in float8 by width\n\nThe gradient of two transformer blocks at 8 x 1,024 "
        "tokens with `O2:bfloat16,attention=fused`, and with products in float8 added (`python -m "
        f"benchmarks.studies.float8_widths`, jax {stored['jax']}): milliseconds, and the memory beside the arguments. "
        "XLA chooses among its own products and cuBLASLt's; with `--xla_gpu_enable_triton_gemm=false` it has cuBLASLt "
        "alone. Where transposes are left to it, operands are not laid out for products in float8, as they were not "
        "before [this was measured](float8.md#what-it-costs-and-what-it-is-worth)."
    )
    lines = []
    for run, widths in stored["runs"].items():
        for width, row in widths.items():
            base = next(iter(row["gradients"].values()), None)
            for policy, found in row["gradients"].items():
                *_, setting = policy.partition("attention=fused")
                texts = (found["ms"], found["ms"] / base["ms"], found["temporary MB"])
                lines.append((run, width, setting.lstrip(",") or "bfloat16", *(number(x) for x in texts)))
    heading = ("products", "width", "setting", "ms", "of bfloat16", "temporary MB")
    return text + "\n\n" + markdown(heading, lines, names=3)


def scaling(stored: dict[str, Any]) -> str:
    """Returns the section on loss scaling: `stored` is what `benchmarks.studies.scaling` writes."""
    text = (
        "## The cost of loss scaling\n\nMilliseconds a train step with float32 weights and Adam, and what unscaling, "
        f"checking and skipping add (`python -m benchmarks.studies.scaling`, {stored['device']}, jax {stored['jax']}). "
        "It is proportional to the weights, a step to weights times batch. Without the conditional, `loss_scaled` as a "
        "link of a chain, it is the check alone: one read of the gradients. With it, updates are written and read once "
        "more."
    )
    heading = ("way", *stored["step_ms"], "passes over the gradients before the optimizer")
    lines = []
    base, *_ = ways = list(next(iter(stored["step_ms"].values())))
    for way in ways:
        texts = [f"{ms[way]:.1f} ({100 * (ms[way] / ms[base] - 1):+.1f} %)" for ms in stored["step_ms"].values()]
        passes = stored["memory_passes"].get(way)
        lines.append((way, *texts, number(passes, digits=1)))
    return text + "\n\n" + markdown(heading, lines)


def published(stored: dict[str, dict[str, Any]]) -> str:
    """Returns the section on published models: `stored` is what `benchmarks.studies.published` writes."""
    ran = {name: found for name, found in stored.items() if "without jamp" not in found}
    policies = list(next(iter(ran.values())))
    text = (
        f"## Published models\n\n{len(ran)} models that others published, unmodified, in tiny sizes with random "
        "weights (`python -m benchmarks.studies.published`): the share of the FLOPs of matrix products and "
        "convolutions in half, of the forward or of the backward pass, whichever is less, and the error of "
        "the gradient over that of the model in half. First over that of its library's own mixed precision (`hf`, "
        "Hugging Face Flax with `dtype=`), or, where there is none, of the model cast as a whole by jmp; then, behind "
        "the slash, over that of everything in half, sums and all, as at O3."
    )
    heading = ("model", *(title for policy in policies for title in (f"{policy}: half %", "error over half")))
    lines = []
    for name, found in ran.items():
        texts = []
        for policy in policies:
            result = found[policy]
            ratios = " / ".join(number(result[key]) or "NaN" for key in ("over_half", "over_all_half"))
            texts += ["fails", ""] if "error" in result else [number(result["half_share"], 100, 1), ratios]
        lines.append((name, *texts))
    lines.sort(key=lambda line: line[0])
    absent = ", ".join(sorted(set(stored) - set(ran)))
    note = (
        "\n\nIn the mixed precision of XGLM, ViT and DINOv2 themselves the residual stream is float32, because the "
        "position embeddings are; and jmp leaves most of a flow in float32, because constants of it are: these are not "
        "in half. NaN stands where its gradients are not numbers: DistilBERT's own in float16, and with everything in "
        "float16 those of models that mask with large numbers, among others."
    )
    note += f" Without jamp these fail on this jax: {absent}." if absent else ""
    return text + "\n\n" + markdown(heading, lines) + note


def solvers(stored: dict[str, Any]) -> str:
    """Returns the section on solvers: `stored` is what `benchmarks.studies.solvers` writes."""
    rows = stored["solvers"]
    seeds = len(next(iter(next(iter(rows.values())).values()))["steps"])
    text = (
        f"## Solvers\n\nSteps that published solvers take until their own tolerance is met, unmodified, with a network "
        f"of 32 units in what they solve (`python -m benchmarks.studies.solvers`, jax {stored['jax']}), on {seeds} "
        "random problems each, and how far the result is from float32's, relative to it, at most."
    )
    policies = [name for name in next(iter(rows.values())) if name != "float32"]
    heading = ("solver", "float32", *(title for name in policies for title in (name, "result off")))
    lines = []
    for solver, found in rows.items():
        plain = found["float32"]["steps"]
        texts = [", ".join(map(str, plain))]
        for name in policies:
            steps = found[name]["steps"]
            texts.append("the same" if steps == plain else ", ".join(map(str, steps)))
            texts.append(f"{100 * max(found[name]['off']):.2g} %")
        lines.append((solver, *texts))
    return text + "\n\n" + markdown(heading, lines)


def float8(stored: dict[str, Any]) -> str:
    """Returns the section on float8: `stored` is what `benchmarks.studies.float8_models` writes."""
    rows = stored["models"]
    text = (
        f"## Float8\n\nThe error of the gradient relative to float32's, in %, of {len(rows)} models "
        f"(`python -m benchmarks.studies.float8_models`, jax {stored['jax']}, on a CPU, which computes the same "
        "numbers): in bfloat16 (O2), with `matmul=float8`, and with every product in float8 whose sizes are multiples "
        "of 16; beside it the share of the FLOPs of the gradient that are float8. The models are small: of most, no "
        "product is large enough to be chosen. Rounding to E4M3 moves a number by up to 6 %, sixteen times as much as "
        "to bfloat16. Of Keras's two networks with random weights no half gradient says anything, nor does that of "
        "their own mixed precision."
    )
    return text + "\n\n" + _float8_table(rows)


def float8_published(stored: dict[str, Any]) -> str:
    """Returns the section on published models in float8: what the same study writes with `--published`."""
    rows = {name: row for name, row in stored["models"].items() if not isinstance(row, str)}
    not_finite = [name for name, row in rows.items() if not all(isfinite(x["gradient_error"]) for x in row.values())]
    absent = sorted(set(stored["models"]) - set(rows))
    text = (
        f"### Published models in float8\n\nThe same of {len(rows)} published models "
        f"(`python -m benchmarks.studies.float8_models --published`, jax {stored['jax']}), in the tiny sizes that the "
        "next section has them in, and of some with every product that fits. None fails in "
        "float8, and "
    )
    text += f"gradients with a NaN have {', '.join(not_finite)}." if not_finite else "no gradient has a NaN."
    text += f" Without jamp these fail on this jax: {', '.join(absent)}." if absent else ""
    return text + "\n\n" + _float8_table(rows)


def _float8_table(rows: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    heading = ("model", *(title for name in names for title in ((name, "FLOPs %") if "float8" in name else (name,))))
    lines = []
    for model, row in rows.items():
        texts = []
        for name in names:
            found = row.get(name, {})
            texts.append(number(found.get("gradient_error"), 100, 1))
            texts += [number(found.get("share"), 100, 0)] if "float8" in name else []
        lines.append((model, *texts))
    return markdown(heading, lines)


STATES = (
    "bfloat16",
    "int8",
    "int8, other draws",
    "float8",
    "float32, last bits changed",
    "float32, updates changed by 2 %",
)


def optimizer_states(stored: dict[str, Any]) -> str:
    """Returns the table of `docs/training.md`: `stored` is what `benchmarks.studies.optimizer_states` writes.

    A task that ran as long with other settings, on another device say, is there with those that most runs have.
    """
    groups: dict[tuple, dict[tuple, dict]] = {}
    for run in stored["runs"]:
        settings = tuple(run.get(key) for key in ("device", "jax", "text", "batch", "size"))
        losses = groups.setdefault((run["task"], run["steps"], run["schedule"]), {}).setdefault(settings, {})
        losses[run["state"], run["seed"]] = run["held-out loss"]
    lines = []
    for (task, steps, schedule), found in sorted(groups.items()):
        losses = max(found.values(), key=len)
        seeds = sorted(seed for state, seed in losses if state == "float32")
        name = f"{task}, {steps:,} steps" + (", constant rate" if schedule == "constant" else "")
        lines += [_states_line(name, f"seed {seed}", losses, [seed]) for seed in seeds]
        if len(seeds) > 1:
            lines.append(_states_line(name, "mean", losses, seeds))
    return markdown(("task", "", "float32: the loss", *STATES), lines, names=2)


def _states_line(task: str, name: str, losses: dict[tuple[str, int], float], seeds: list[int]) -> tuple[str, ...]:
    """The loss of float32 and the differences from it, where a state has run with all the seeds."""
    texts = []
    for state in STATES:
        off = [100 * (losses[state, s] / losses["float32", s] - 1) for s in seeds if (state, s) in losses]
        texts.append(f"{mean(off):+.2f} %" if len(off) == len(seeds) else "")
    return task, name, f"{mean(losses['float32', s] for s in seeds):.4f}", *texts
