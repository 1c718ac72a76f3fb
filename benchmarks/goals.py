"""What measurements are held against."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from benchmarks.tables import number, print_table


@dataclass(frozen=True)
class Goal:
    """A bound on one number.

    Attributes:
        name: What is bounded.
        value: What was measured; None where nothing was.
        limit: The bound.
        worst: Model with the largest value, where the number is a mean or a maximum over models.
        at_most: Whether the bound is an upper one.
    """

    name: str
    value: float | None
    limit: float
    worst: str = ""
    at_most: bool = True

    @property
    def passed(self) -> bool:
        """Whether the bound holds; a number that was not measured breaks none."""
        return self.value is None or (self.value <= self.limit if self.at_most else self.value >= self.limit)

    @property
    def bound(self) -> str:
        """The bound, in characters."""
        return f"{'<=' if self.at_most else '>='} {self.limit:.2f}"

    def __str__(self) -> str:
        return f"{self.name} {number(self.value)} (goal {self.bound})"


def print_goals(
    goals: Sequence[Goal], title: str = "Goals", judge: bool = True, console: Console | None = None
) -> None:
    """Prints every goal with what was measured, and with PASS or FAIL if `judge` says so."""
    if not goals:
        return

    def mark(goal: Goal) -> str:
        if goal.value is None or not judge:
            return "-"
        return "[green]PASS[/]" if goal.passed else "[red]FAIL[/]"

    rows = [(mark(goal), goal.name, number(goal.value), goal.bound, goal.worst) for goal in goals]
    print_table(title, ("", "goal", "measured", "bound", "worst"), rows, names=2, console=console)
