"""Draw the documentation's pictures: `python tools/draw_docs.py` writes `docs/images`, in light and dark.

The diagrams are SVG, written by hand below. The chart of memory is measured: it asks `jamp.report` what reverse mode
keeps of a transformer block.
"""

from __future__ import annotations

import collections
import pathlib
from dataclasses import dataclass, field
from html import escape
from typing import Any

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"

THEMES = {
    "light": {
        "ink": "#263238", "soft": "#78909c", "paper": "#ffffff", "half": "#ffe0b2", "half_edge": "#e65100",
        "full": "#c5cae9", "full_edge": "#283593", "plain": "#eceff1", "plain_edge": "#90a4ae", "region": "#eef0fb",
    },
    "dark": {
        "ink": "#e3e6ee", "soft": "#9aa4b5", "paper": "#1e2129", "half": "#6d4310", "half_edge": "#ffb74d",
        "full": "#303c86", "full_edge": "#9fa8da", "plain": "#333846", "plain_edge": "#77809a", "region": "#252a45",
    },
}  # fmt: skip
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


@dataclass
class Drawing:
    """An SVG picture: boxes, arrows and words at given places, in the colors of a theme."""

    width: int
    height: int
    title: str
    theme: dict[str, str]
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, text: str = "", kind: str = "plain", note: str = "") -> None:
        """A box of `kind` (plain, half, full) with words in its middle and a smaller note below them."""
        fill, edge = self.theme[kind], self.theme[f"{kind}_edge"]
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{edge}"/>')
        middle = y + h / 2 + (-3 if note else 5)
        self.text(x + w / 2, middle, text)
        if note:
            self.text(x + w / 2, middle + 17, note, size=11.5, color="soft" if kind == "plain" else "ink")

    def region(self, x: float, y: float, w: float, h: float, text: str) -> None:
        """A dashed frame with its name on top."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="10" fill="{self.theme["region"]}" '
            f'stroke="{self.theme["full_edge"]}" stroke-dasharray="5 4"/>'
        )
        self.text(x + 10, y + 18, text, size=12.5, anchor="start", color="soft")

    def text(self, x: float, y: float, text: str, size: float = 14, anchor: str = "middle", color: str = "ink") -> None:
        """Words."""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{self.theme[color]}">'
            f"{escape(text)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, kind: str = "ink", dashed: bool = False) -> None:
        """An arrow."""
        color = self.theme[kind]
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="1.8"{dash} '
            f'marker-end="url(#head-{kind})"/>'
        )

    def svg(self) -> str:
        """The picture as a file."""
        heads = "".join(
            f'<marker id="head-{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="{self.theme[kind]}"/></marker>'
            for kind in ("ink", "half_edge", "full_edge")
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'font-family="{FONT}"><title>{escape(self.title)}</title><defs>{heads}</defs>'
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{self.theme["paper"]}"/>'
            + "\n".join(self.parts)
            + "</svg>\n"
        )


def legend(d: Drawing, x: float, y: float) -> None:
    """Which color means which precision."""
    for i, (kind, words) in enumerate((("half", "half precision"), ("full", "float32"))):
        d.box(x + 130 * i, y, 16, 16, kind=kind)
        d.text(x + 130 * i + 24, y + 13, words, size=12.5, anchor="start")


def flow(theme: dict[str, str]) -> Drawing:
    """How half precision runs through a model."""
    d = Drawing(980, 300, "Half precision flows through a model; the norm and the loss are float32 regions", theme)
    legend(d, 24, 18)
    y = 120
    d.box(24, y, 70, 54, "x", "half")
    d.region(124, y - 42, 290, 118, "norm: a float32 region")
    d.box(138, y, 78, 54, "mean", "full")
    d.box(238, y, 78, 54, "x − mean", "full")
    d.box(338, y, 64, 54, "× 1/σ", "full")
    d.box(450, y, 86, 54, "matmul", "half")
    d.box(566, y, 70, 54, "relu", "half")
    d.box(666, y, 86, 54, "matmul", "half", "float32 out")
    d.region(780, y - 42, 182, 118, "loss: a float32 region")
    d.box(792, y, 78, 54, "softmax", "full")
    d.box(886, y, 64, 54, "−log", "full")
    for x1, x2 in ((94, 138), (216, 238), (316, 338), (402, 450), (536, 566), (636, 666), (752, 792), (870, 886)):
        d.arrow(x1, y + 27, x2, y + 27)
    for x, name, note, top in (
        (370, "scale", "not cast", y + 54),
        (493, "w₁", "cast here", y + 54),
        (709, "w₂", "cast here", y + 54),
    ):
        d.box(x - 44, 228, 88, 50, name, "full", note)
        d.arrow(x, 228, x, top)
    d.text(24, 250, "parameters stay float32; each is cast", size=12.5, anchor="start", color="soft")
    d.text(24, 268, "where it is used, if it is used in half", size=12.5, anchor="start", color="soft")
    return d


def demand(theme: dict[str, str]) -> Drawing:
    """What readers ask for, from the last operation to the first."""
    d = Drawing(980, 290, "Readers ask for precision, from the last operation back to the first", theme)
    legend(d, 24, 18)
    for y, names, kinds, words in (
        (78, ("x", "x · x", "sum", "√"), ("half", "full", "full", "full"), "“I add up: give me float32”"),
        (190, ("x", "relu(x)", "matmul", "h"), ("half", "half", "half", "half"), "“I multiply: half will do”"),
    ):
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            d.box(40 + 190 * i, y, 110, 46, name, kind)
            if i:
                d.arrow(150 + 190 * (i - 1), y + 16, 40 + 190 * i, y + 16)
        d.arrow(420, y + 34, 340, y + 34, "full_edge" if kinds[1] == "full" else "half_edge", dashed=True)
        d.text(380, y + 72, words, size=12.5, color="soft")
    d.text(742, 96, "the square is float32 too:", size=12.5, anchor="start", color="soft")
    d.text(742, 113, "300 · 300 is infinite in float16", size=12.5, anchor="start", color="soft")
    d.text(742, 208, "nothing between products", size=12.5, anchor="start", color="soft")
    d.text(742, 225, "needs float32", size=12.5, anchor="start", color="soft")
    return d


def islands(theme: dict[str, str]) -> Drawing:
    """What is stored of a float32 region."""
    d = Drawing(980, 330, "A float32 region is computed in registers, and what is stored is half", theme)
    legend(d, 24, 18)
    d.text(24, 72, "What the program says", size=13, anchor="start", color="soft")
    for i, (name, kind) in enumerate(
        (
            ("h", "half"),
            ("h − mean", "full"),
            ("× 1/σ", "full"),
            ("× scale", "full"),
            ("round", "half"),
            ("matmul", "half"),
        )
    ):
        d.box(24 + 160 * i, 88, 116, 48, name, kind)
        if i:
            d.arrow(140 + 160 * (i - 1), 112, 24 + 160 * i, 112)
    d.text(24, 190, "What the device does", size=13, anchor="start", color="soft")
    d.box(24, 208, 116, 64, "h", "half", "read: 2 bytes")
    d.region(184, 200, 576, 84, "one kernel: float32 in registers, nothing stored")
    for x, name in ((204, "raise"), (314, "subtract"), (424, "multiply"), (534, "multiply"), (644, "round")):
        d.box(x, 230, 96, 38, name, "full")
    d.box(824, 208, 116, 64, "normalized", "half", "written: 2 bytes")
    d.arrow(140, 240, 200, 240)
    d.arrow(740, 240, 824, 240)
    d.text(
        490,
        312,
        "Float32 inside costs no memory traffic: each element is read in half and written in half.",
        size=12.5,
        color="soft",
    )
    return d


def residuals(theme: dict[str, str]) -> Drawing:
    """What is kept from the forward pass for the backward pass."""
    d = Drawing(980, 330, "What waits in memory for the backward pass", theme)
    legend(d, 24, 18)
    names = ("matmul", "× 0.5", "tanh(…)", "1 + …", "gelu", "matmul")
    for i, name in enumerate(names):
        d.box(110 + 140 * i, 58, 104, 40, name)
        if i:
            d.arrow(214 + 140 * (i - 1), 78, 110 + 140 * i, 78)
    rows = (
        ("float32", ("full", "full", "full", "full", "full", "")),
        ("by hand", ("half", "half", "half", "half", "half", "")),
        ("jamp", ("half", "", "", "", "half", "")),
    )
    for row, (label, kinds) in enumerate(rows):
        y = 132 + 58 * row
        d.text(24, y + 24, label, anchor="start")
        for i, kind in enumerate(kinds):
            if kind:
                d.box(110 + 140 * i, y, 104 if kind == "full" else 52, 36, "4 B" if kind == "full" else "2 B", kind)
            elif row == 2 and i < 5:
                d.text(162 + 140 * i, y + 23, "made again", size=12.5, color="soft")
    d.text(
        110,
        318,
        "Bytes of each element that are kept. What is elementwise is made again in the backward pass, "
        "inside of the kernel that reads it.",
        size=12.5,
        anchor="start",
        color="soft",
    )
    return d


DIAGRAMS = {"flow": flow, "demand": demand, "islands": islands, "residuals": residuals}


def kept_by_layer() -> dict[str, dict[str, float]]:
    """Kilobytes that reverse mode keeps of each part of a transformer block: float32, by hand, jamp."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    import jamp

    class Block(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            h = nn.LayerNorm(dtype=self.dtype, name="norm 1")(x)
            x = x + nn.SelfAttention(8, dtype=self.dtype, name="attention")(h)
            h = nn.LayerNorm(dtype=self.dtype, name="norm 2")(x)
            h = nn.gelu(nn.Dense(2048, dtype=self.dtype, name="up")(h))
            return x + nn.Dense(512, dtype=self.dtype, name="down")(h)

    x = jax.ShapeDtypeStruct((8, 256, 512), jnp.float32)
    as_written = "p=float32,c=float32,o=float32"
    candidates = {"float32": (None, as_written), "by hand": (jnp.bfloat16, as_written), "jamp": (None, "O2:bfloat16")}
    kept = {}
    for name, (dtype, policy) in candidates.items():
        params = jax.eval_shape(Block().init, jax.random.key(0), x)

        def loss(params, x, model=Block(dtype)):  # noqa: B008
            return model.apply(params, x).astype(jnp.float32).mean()

        parts: collections.Counter = collections.Counter()
        for residual in jamp.report(loss, params, x, policy=policy).residuals:
            parts[_part(residual.where)] += residual.bytes / 2**20
        kept[name] = dict(parts)
    return kept


def _part(where: str) -> str:
    """The part of the block that a kept value belongs to, told by what the report says of its origin."""
    for part in ("norm 1", "norm 2", "attention", "up"):
        if f"/{part}" in where:
            return part
    if "argument" in where:
        return "copies of weights"
    return "residual sum" if where.startswith("add ") else "gelu"


def main() -> None:
    """Writes the pictures."""
    for name, draw in DIAGRAMS.items():
        for theme, colors in THEMES.items():
            (IMAGES / f"{name}-{theme}.svg").write_text(draw(colors).svg())
    draw_memory(kept_by_layer())


def draw_memory(kept: dict[str, dict[str, float]]) -> None:
    """Draws the chart of memory by layer, and prints its numbers."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "jamp"
    parts = ["norm 1", "attention", "residual sum", "norm 2", "up", "gelu", "copies of weights"]
    totals = {name: sum(values.values()) for name, values in kept.items()}
    print({name: {part: round(values.get(part, 0), 2) for part in parts} for name, values in kept.items()}, totals)
    for theme, colors in THEMES.items():
        figure, axis = plt.subplots(figsize=(9.8, 3.4), facecolor=colors["paper"])
        axis.set_facecolor(colors["paper"])
        for i, (name, color) in enumerate(
            zip(kept, (colors["full_edge"], colors["soft"], colors["half_edge"]), strict=True)
        ):
            at = [p + 0.27 * (i - 1) for p in range(len(parts))]
            heights = [kept[name].get(part, 0) for part in parts]
            axis.bar(at, heights, 0.25, label=f"{name}: {totals[name]:.0f} MB", color=color)
        axis.set_xticks(range(len(parts)), parts)
        axis.set_ylabel("MB kept")
        axis.set_title("What a transformer block keeps for the backward pass", loc="left", color=colors["ink"])
        axis.legend(frameon=False, labelcolor=colors["ink"])
        axis.tick_params(colors=colors["ink"])
        axis.yaxis.label.set_color(colors["ink"])
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axis.spines[side].set_color(colors["soft"])
        figure.tight_layout()
        figure.savefig(IMAGES / f"memory-{theme}.svg", metadata={"Date": None}, facecolor=colors["paper"])
        plt.close(figure)


if __name__ == "__main__":
    main()
