"""What MkDocs makes while it builds the site: the lists of operations, and the page of changes.

`<!-- op-lists: classes -->` and `<!-- op-lists: presets -->` on a page become tables of what jamp itself reads.
"""

import html
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

HALF, FULL, KEEP = "half", "full", "keep"

# How operations of a class are computed at each level, as (color, words).
WORDS = {
    "half": {
        "O0": (FULL, "float32"),
        "OD": (HALF, "half, result float32"),
        "O1": (HALF, "half"),
        "O2": (HALF, "half"),
        "O3": (HALF, "half"),
    },
    "full": {
        "O0": (FULL, "float32"),
        "OD": (FULL, "float32"),
        "O1": (FULL, "float32"),
        "O2": (FULL, "float32"),
        "O3": (HALF, "half"),
    },
    "no_half": dict.fromkeys(("O0", "OD", "O1", "O2", "O3"), (FULL, "float32")),
    "promote": {
        "O0": (FULL, "float32"),
        "OD": (FULL, "float32"),
        "O1": (KEEP, "widest operand"),
        "O2": (KEEP, "as the data flows"),
        "O3": (HALF, "half"),
    },
    "follow": {
        "O0": (FULL, "float32"),
        "OD": (FULL, "float32"),
        "O1": (KEEP, "as it comes"),
        "O2": (KEEP, "as it comes"),
        "O3": (HALF, "half"),
    },
    "traced": dict.fromkeys(("O0", "OD", "O1", "O2", "O3"), (KEEP, "as written")),
    "recurse": dict.fromkeys(("O0", "OD", "O1", "O2", "O3"), (KEEP, "looks inside")),
    "opaque": dict.fromkeys(("O0", "OD", "O1", "O2", "O3"), (KEEP, "as written")),
}
TITLES = {
    "half": ("Half", "Matrix units multiply half operands and add in float32."),
    "full": ("Float32", "Functions whose result moves fast, or leaves float16's range; sums, which lose bits."),
    "no_half": ("Float32, at O3 too", "No library has a half kernel for these."),
    "promote": ("Promote", "All operands come to one dtype."),
    "follow": ("Follow", "Data moves or is selected: the dtype that comes in goes out."),
    "traced": ("As written", "Bits, keys, counters, and what carries a float32 computation inside."),
    "recurse": ("Recurse", "Calls, loops and branches: the rules hold for what is inside."),
    "opaque": ("Opaque", "Kernels, foreign functions, callbacks: run exactly as traced, and named in the report."),
}


def primitive_classes() -> dict[str, str]:
    """The class of every primitive that jamp knows. The one place here that knows where its table is."""
    from jamp import _primitives

    return {name: row.rule.value for name, row in _primitives.TABLE.items()}


def preset_lists() -> dict[str, dict[str, tuple[str, ...]]]:
    """The lists of every preset: what `jamp.Policy.preset` says, by name."""
    import jamp

    try:
        jamp.Policy.preset("")
    except ValueError as error:
        names = re.search(r"expected one of ([\w, ]+)", str(error))
        assert names is not None, error
    policies = {name: jamp.Policy.preset(name) for name in names[1].split(", ")}
    return {name: {"half": p.half, "full": p.full, "promote": p.promote} for name, p in policies.items()}


def classes_table() -> str:
    """The primitives by class, with what each level does with them."""
    by_class: dict[str, list[str]] = {}
    for name, group in sorted(primitive_classes().items()):
        by_class.setdefault(group, []).append(name)
    unknown = by_class.keys() - TITLES.keys()
    if unknown:
        raise ValueError(f"tools/docs_hooks.py has no words for the classes {sorted(unknown)} of primitives.")
    parts = []
    for group, (title, reason) in TITLES.items():
        levels = WORDS[group]
        names = ", ".join(f"`{name}`" for name in by_class.get(group, []))
        parts += [
            f"### {title} {{#class-{group}}}",
            reason,
            "| "
            + " | ".join(levels)
            + " |\n"
            + "|---" * len(levels)
            + "|\n| "
            + " | ".join(map(_pill, levels.values()))
            + " |",
            names,
        ]
    return "\n\n".join(parts)


def presets_table() -> str:
    """What each preset lists."""
    parts = []
    for name, lists in preset_lists().items():
        rows = [
            f"| {_pill((color, color))} | {', '.join(f'`{entry}`' for entry in sorted(lists[color]))} |"
            for color in (HALF, FULL)
        ]
        rows.append(f"| {_pill((KEEP, 'promote'))} | {', '.join(f'`{entry}`' for entry in sorted(lists['promote']))} |")
        parts.append(f"### {name} {{#preset-{name}}}\n\n| list | what is on it |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _pill(cell: tuple[str, str]) -> str:
    color, words = cell
    return f'<span class="jamp-{color}">{html.escape(words)}</span>'


TABLES = {"classes": classes_table, "presets": presets_table}


def on_files(files, config):
    """Adds the repository's changelog as a page."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text()))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    """Puts the generated tables in their places."""
    return re.sub(r"<!-- op-lists: (\w+) -->", lambda match: TABLES[match[1]](), markdown)
