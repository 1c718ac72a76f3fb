"""The mutants of a source: the same program with one operator, comparison, constant or branch changed."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_FUNCTIONS = {"any": "all", "all": "any", "max": "min", "min": "max"}


class Mutant(NamedTuple):
    """A changed source.

    Attributes:
        line: The line that was changed.
        change: What stood there, and what stands there now.
        source: The whole source.
    """

    line: int
    change: str
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """All mutants of a source. Annotations, docstrings, decorators and the texts of errors stay as they are."""
    tree = ast.parse(source)
    members = _members(tree)
    skipped = _skipped(tree)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for changed in _changes(node, members):
            line = next(found.lineno for found in ast.walk(node) if isinstance(found, (ast.expr, ast.stmt)))
            text = f"{_shown(node)} -> {_shown(changed)}"
            before = node.__class__, node.__dict__
            node.__class__, node.__dict__ = changed.__class__, {**node.__dict__, **changed.__dict__}
            source_of_mutant = ast.unparse(tree)
            node.__class__, node.__dict__ = before
            yield Mutant(line, text, source_of_mutant)


def _shown(node: ast.AST) -> str:
    text = ast.unparse(node).partition("\n")[0].strip()
    return text if len(text) <= 70 else f"{text[:67]}..."


def _members(tree: ast.AST) -> dict[str, list[str]]:
    """By class, the members of enumerations that a source names: `Kind.HALF`, `Kind.FULL`."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr.isupper():
            members = found.setdefault(node.value.id, [])
            if node.attr not in members:
                members.append(node.attr)
    return found


def _skipped(tree: ast.AST) -> set[int]:
    """Nodes, by identity, whose change would change nothing that a test should tell."""
    roots: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            roots += [node.returns, *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            roots += node.decorator_list
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            roots.append(node.annotation)
        elif isinstance(node, (ast.Raise, ast.JoinedStr)) or _is_idle(node):
            roots.append(node)
    return {id(node) for root in roots if root is not None for node in ast.walk(root)}


def _is_idle(node: ast.AST) -> bool:
    """Docstrings, what only type checkers read, and and `strict=True`, which tells of broken invariants alone."""
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _changes(node: ast.AST, members: dict[str, list[str]]) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=comparators):
            yield from (ast.Compare(left, [other()], comparators) for other in _COMPARISONS[type(op)])
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield ast.Call(ast.Name("bool"), [operand], [])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            yield ast.BinOp(left, _OPERATORS[type(op)](), right)
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Name(id=name, ctx=ast.Load()) if name in _FUNCTIONS:
            yield ast.Name(_FUNCTIONS[name])
        case ast.Attribute(value=ast.Name(id=owner) as value, attr=attr) if attr in members.get(owner, ()):
            others = members[owner]
            if len(others) > 1:
                yield ast.Attribute(value, others[(others.index(attr) + 1) % len(others)])
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.If(test=test, body=body, orelse=orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.comprehension(target=target, iter=iterated, ifs=[test]):
            yield ast.comprehension(target, iterated, [ast.UnaryOp(ast.Not(), test)], 0)
