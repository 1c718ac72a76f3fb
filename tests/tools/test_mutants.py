"""What a mutant is: one change of a source, of what decides."""

import pytest

from tools.mutants.changes import mutants


def changes(source):
    return [mutant.change for mutant in mutants(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["a < b -> a <= b", "a < b -> a >= b"]),
        ("a is b", ["a is b -> a is not b"]),
        ("a in b", ["a in b -> a not in b"]),
        ("a and b", ["a and b -> a or b"]),
        ("not a", ["not a -> bool(a)"]),
        ("a + b", ["a + b -> a - b"]),
        ("a | b", ["a | b -> a & b"]),
        ("f(True)", ["True -> False"]),
        ("f(3)", ["3 -> 4"]),
        ("any(a)", ["any -> all"]),
        ("a if b else c", ["a if b else c -> c if b else a"]),
        ("[a for a in b if c]", ["for a in b if c -> for a in b if not c"]),
        ("if a:\n    b", ["if a: -> if not a:"]),
        ("f(Kind.HALF, Kind.FULL)", ["Kind.HALF -> Kind.FULL", "Kind.FULL -> Kind.HALF"]),
    ],
)
def test_changes(source, expected):
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Text, 3 of it."""',
        "def f(a: int | None) -> int | None: return a",
        "@decorated(3)\ndef f(): pass",
        'raise ValueError("3" + f"{4}")',
        "if TYPE_CHECKING:\n    a = 3",
        "zip(a, b, strict=True)",
        "f(Kind.HALF)",  # There is no other member to put there.
    ],
)
def test_what_tests_cannot_tell_is_left_alone(source):
    assert changes(source) == []


def test_each_mutant_is_one_change_and_says_where():
    source = "x = 1\ny = x + 2\n"
    found = list(mutants(source))
    assert [(mutant.line, mutant.source) for mutant in found] == [
        (1, "x = 2\ny = x + 2"),
        (2, "x = 1\ny = x - 2"),
        (2, "x = 1\ny = x + 3"),
    ]
