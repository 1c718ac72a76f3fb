"""Tables, on the terminal and in Markdown."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

BREAK: tuple[str, ...] = ()  # In place of a row: a line across the table.


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    names: int = 1,
    caption: str | None = None,
    console: Console | None = None,
) -> None:
    """Prints a table.

    Args:
        title: Stands above it.
        headings: One for each column.
        rows: A text for each column; `BREAK` for a line across the table.
        names: How many columns, from the left, are names; the others are numbers, which stand to the right.
        caption: Stands below it.
        console: Where to print; default the terminal, or 240 columns where the output goes to a file.
    """
    table = Table(title=title, caption=caption, header_style="bold", caption_justify="left")
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position < names else "right", no_wrap=position < names)
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    (console or terminal()).print(table)


def terminal() -> Console:
    """The terminal; where the output goes to a file, one that is wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1, align: str = "--:") -> str:
    """Returns a Markdown table.

    Args:
        headings: One for each column.
        rows: A text for each column.
        names: How many columns, from the left, are names.
        align: Of the other columns: `"--:"` to the right, `":--"` to the left.
    """
    rule = [":--"] * names + [align] * (len(headings) - names)
    return "\n".join("| " + " | ".join(texts) + " |" for texts in (headings, rule, *rows))


def message(error: Exception) -> str:
    """What an exception says, cut off where it is long."""
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def number(value: float | None, factor: float = 1.0, digits: int = 2) -> str:
    """A number times a factor, with some digits after the point; nothing for None."""
    return "" if value is None else f"{factor * value:.{digits}f}"
