"""The documentation's code as programs: every page's blocks, in order, in one namespace, as a reader would run them.

What a page may say of a block, in an HTML comment on a line of its own in front of it:

* `<!-- not run: REASON -->`: a fragment that cannot run here, such as code of another framework.
* `<!-- file: NAME -->`, once, anywhere: code of this page passes for the file NAME, whose name its output shows.

A `text` block right after a `python` block is what the latter prints. A page with content tabs (`=== "Flax"`) is run
once for each tab that has code, with what stands in no tab.
"""

import contextlib
import io
import itertools
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))

# A fence may be indented, in a list or in a content tab.
_BLOCK = re.compile(
    r"(?:^[ ]*<!-- not run: (?P<reason>[^\n]+?) -->\n\s*)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_TAB = re.compile(r'^(?P<indent>[ ]*)=== "(?P<name>[^"]+)"$', re.MULTILINE)
_FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of Python of a page: its first line there, and what the page says that it prints."""

    line: int
    code: str
    expected: str | None
    reason_not_run: str | None
    tab: str | None


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page."""
    found = list(_BLOCK.finditer(text))
    return [
        Block(
            line=text[: match.start("code")].count("\n") + 1,
            code=_code(match),
            expected=_code(after) if after and _prints(text, match, after) else None,
            reason_not_run=match["reason"],
            tab=_tab(text, match),
        )
        for match, after in itertools.pairwise([*found, None])
        if match["language"] == "python"
    ]


def tabs(text: str) -> list[str | None]:
    """The tabs of a page that have code to run; `[None]` for a page without."""
    return list(dict.fromkeys(block.tab for block in blocks(text) if block.tab and not block.reason_not_run)) or [None]


def _tab(text: str, match: re.Match) -> str | None:
    """The label of the tab that a block stands in: the last one that is indented less, if nothing else came between."""
    depth = len(match["indent"])
    before = [tab for tab in _TAB.finditer(text, 0, match.start()) if len(tab["indent"]) < depth]
    if not before:
        return None
    between = text[before[-1].end() : match.start()].splitlines()
    inside = all(not line.strip() or line.startswith(" " * depth) for line in between)
    return before[-1]["name"] if inside else None


def _code(match: re.Match) -> str:
    return textwrap.dedent(match["code"])


def _prints(text: str, match: re.Match, after: re.Match) -> bool:
    return after["language"] == "text" and not text[match.end() : after.start()].strip()


def run(text: str, name: str = "page.md", tab: str | None = None) -> dict:
    """Runs a page, and of its content tabs one.

    Returns:
        What its code defines.

    Raises:
        AssertionError: If a block prints something else than the page says.
    """
    names: dict = {"__name__": "__main__"}
    file = _FILE.search(text)
    for block in blocks(text):
        if block.reason_not_run or block.tab not in (None, tab):
            continue
        # Blank lines in front make the lines of tracebacks those of the page.
        code = block.code if file else "\n" * (block.line - 1) + block.code
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, file[1] if file else name, "exec"), names)
        if block.expected is not None:
            assert _lines(printed.getvalue()) == _lines(block.expected), f"{name}, line {block.line}"
    return names


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def headings(text: str) -> set[str]:
    """The anchors that a page's headings make, as MkDocs and GitHub spell them."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+?)(?: *\{.*\})?$", text, re.MULTILINE)
    explicit = set(re.findall(r"\{ ?#([\w-]+)", text))
    return explicit | {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def links(text: str) -> list[tuple[str, str]]:
    """The links of a page that stay in this repository, as file and anchor."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text)
    return [(file, anchor) for file, anchor in found if "://" not in file and (file or anchor)]
