"""The tables that all benchmarks print and render, and their goals."""

from benchmarks.goals import Goal, print_goals
from benchmarks.tables import BREAK, markdown, print_table


def cells(printed):
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]


def test_rows_and_breaks_are_printed(capsys):
    print_table("A title", ("name", "number"), [("a", "1.5"), BREAK, ("b", "20")])
    printed = capsys.readouterr().out
    assert "A title" in printed and cells(printed) == [["a", "1.5"], ["b", "20"]]
    assert "│ a    │    1.5 │" in printed  # Names to the left, numbers to the right.
    assert printed.count("├") == 1


def test_markdown_has_names_on_the_left_and_numbers_on_the_right():
    assert markdown(("model", "kind", "MB"), [("lm", "linen", "1.5")], names=2).splitlines() == [
        "| model | kind | MB |",
        "| :-- | :-- | --: |",
        "| lm | linen | 1.5 |",
    ]


def test_goals_pass_fail_or_are_not_measured(capsys):
    found = [Goal("low", 1.0, 1.0), Goal("high", 1.0, 2.0, "model 1.00", at_most=False), Goal("unknown", None, 1.0)]
    print_goals(found)
    assert cells(capsys.readouterr().out) == [
        ["PASS", "low", "1.00", "<= 1.00", ""],
        ["FAIL", "high", "1.00", ">= 2.00", "model 1.00"],
        ["-", "unknown", "", "<= 1.00", ""],
    ]
    print_goals(found, "To compare with", judge=False)
    assert {row[0] for row in cells(capsys.readouterr().out)} == {"-"}
    print_goals([])
    assert capsys.readouterr().out == ""
