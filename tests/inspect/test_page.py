"""The page on inspection: its legend has every rule. That its code prints what it says is in tests/docs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import jamp
from jamp.transforms.program.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "inspect.md"


# Where the name of a rule stands among the arguments of the functions that make a step.
RULE_ARGUMENT = {"step": 0, "plan_traced": 1, "Step": 4, "Operation": 6, "rule_scope": 0}


def rule_names() -> Iterator[str]:
    """The names of rules that jamp's sources write where they make a step, or label an operation."""
    for path in Path(jamp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                index = RULE_ARGUMENT.get(name, len(node.args))
                inside = (n for argument in node.args[index : index + 1] for n in ast.walk(argument))
                yield from (n.value for n in inside if isinstance(n, ast.Constant) and isinstance(n.value, str))


def test_the_legend_has_every_rule():
    legend = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert legend == RULES
    assert set(rule_names()) - set(RULES) == set()
