"""The table and the picture of `digits.py`."""

import dataclasses
import math
import pathlib

import matplotlib
import rich.box
import rich.table
from _shared import line_style, smooth

import jamp

matplotlib.use("Agg")  # A picture for a file needs no display.
import matplotlib.pyplot as plt


@dataclasses.dataclass
class Run:
    """One model, trained at one policy.

    Attributes:
      accuracy: share of the test images that are classified rightly.
      losses: the unscaled training loss of every step.
      scales: the loss scale after every step.
      half_share: share of the step's matmul and convolution FLOPs that ran in 16 bits.
      residual_bytes: what reverse mode keeps between forward and backward.
      skipped: steps that were skipped because a gradient was not finite.
      step_seconds: median time of a step, compiled and warm; known when all policies have been timed in turn.
    """

    model: str
    policy: jamp.Policy
    accuracy: float
    losses: list[float]
    scales: list[float]
    half_share: float
    residual_bytes: int
    skipped: int
    step_seconds: float = math.nan

    @property
    def dtype(self) -> str:
        return str(self.policy.compute_dtype)

    @property
    def label(self) -> str:
        return f"{self.policy.level} {self.dtype}"


COLUMNS = (
    ("model", "left"),
    ("level", "left"),
    ("dtype", "left"),
    ("test acc. %", "right"),
    ("last loss", "right"),
    ("step time / O0", "right"),
    ("matmul FLOPs in half %", "right"),
    ("resid. MB", "right"),
    ("last loss scale", "right"),
    ("skipped", "right"),
)


def rows(runs: list[Run]) -> list[tuple[str, ...]]:
    """Returns the table's cells: the step time is relative to the same model's O0 run."""
    reference = {run.model: run.step_seconds for run in runs if run.policy.level == "O0"}
    return [
        (
            run.model,
            str(run.policy.level),
            run.dtype,
            f"{100 * run.accuracy:.2f}",
            f"{run.losses[-1]:.4f}",
            f"{run.step_seconds / reference[run.model]:.2f}",
            f"{100 * run.half_share:.0f}",
            f"{run.residual_bytes / 1e6:.2f}",
            _power_of_two(run.scales[-1]),
            str(run.skipped),
        )
        for run in runs
    ]


def _power_of_two(scale: float) -> str:
    return "1" if scale == 1 else f"2^{math.log2(scale):g}"


def table(runs: list[Run]) -> rich.table.Table:
    # Narrow enough for the 80 columns of a plain terminal.
    result = rich.table.Table(
        title="Handwritten digits", box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )
    for name, justify in COLUMNS:
        result.add_column(name, justify=justify, no_wrap=justify == "left")
    for row in rows(runs):
        result.add_row(*row)
    return result


def markdown(runs: list[Run]) -> str:
    """Returns the same table as Markdown, for the README."""
    header = [name for name, _ in COLUMNS]
    rules = [":--" if justify == "left" else "--:" for _, justify in COLUMNS]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rules, *rows(runs)))


def plot(runs: list[Run], path: pathlib.Path) -> None:
    """Draws the loss curves of every model, and the loss scale of the float16 runs, into one PNG."""
    models = list(dict.fromkeys(run.model for run in runs))
    figure, axes = plt.subplots(2, len(models), figsize=(6 * len(models), 7), sharex=True, squeeze=False)
    for column, model in enumerate(models):
        for run in (run for run in runs if run.model == model):
            axes[0, column].plot(smooth(run.losses), label=run.label, **line_style(run.policy))
            if run.dtype == "float16":
                axes[1, column].plot(run.scales, label=run.label, **line_style(run.policy))
        axes[0, column].set(title=model, ylabel="training loss, smoothed", yscale="log")
        axes[1, column].set(xlabel="step", ylabel="loss scale (float16)", yscale="log")
        axes[1, column].set_yscale("log", base=2)
        axes[0, column].legend()
        if axes[1, column].lines:
            axes[1, column].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
