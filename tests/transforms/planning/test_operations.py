"""What is decided about single operations, for all states of their operands: decision tables, one file an operation.

Of an operation on two operands a row is the state of the first and a column that of the second; of those on one a row
is its state and a column the operation. A cell is what comes out: its kind by the letter, `r` if the operation runs in
float32 and rounds, `b` if it is bfloat16 at a policy of float16, its size if that is not data's, its marks (`i` for
integers, `s` if it is scaled), `*` if it continues a recurrence, then `^` where an operand is raised to float32, `v`
where one is rounded to half, and `!` where that saturates. Of results that are not floating, a cell says
whether the operands are wide or narrow.

`JAMP_UPDATE_PLANS=1` writes the files anew, as it does for plans; read the diff before you commit it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from jamp._dtypes import BFLOAT16, FLOAT16, FLOAT32
from jamp.transforms.analysis.regimes import REGIMES
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Step
from jamp.transforms.program.want import Want
from tests.transforms.planning.decided import STATES, X, decide, equation

FOLDER = Path(__file__).parent / "decisions"
LETTERS = {Kind.WEAK: "W", Kind.LAZY: "L", Kind.HALF: "H", Kind.ISLAND: "I", Kind.STAT: "S", Kind.FULL: "F"}
MARKS = {Mark.HUGE: "h", Mark.QUOTIENT: "q", Mark.TANGENT: "t", Mark.ROUNDS: "d"}
WANTED = (*((level, want) for level in ("O1", "O2") for want in (Want.HALF, Want.FULL)), ("O3", Want.HALF))


def _cell(step: Step) -> str:
    """One decision in a few letters."""
    (flow,) = step.out[:1]
    operated = {
        (cast.dtype if cast else state.dtype).name for cast, state in zip(step.casts, step.ins, strict=True) if state
    }
    saturates = any(cast and cast.saturate for cast in step.casts)
    moved = {cast.dtype == FLOAT32 for cast in step.casts if cast}
    casts = "^" * (True in moved) + "v" * (False in moved) + "!" * saturates
    if flow is None:
        return f"-{'w' if operated == {'float32'} else 'n' if len(operated) == 1 else '?'}{casts}"
    rounds = any(step.out_casts)
    marks = "".join(letter for mark, letter in MARKS.items() if mark in flow.marks)
    marks += "s" if flow.scale else ""
    marks += "" if Mark.FRACTION in flow.marks else "i"
    other = "b" if flow.dtype == BFLOAT16 else ""
    size = "" if flow.size == 64 else flow.size
    return f"{LETTERS[flow.kind]}{other}{'r' * rounds}{size}{marks}{'*' * bool(flow.roots)}{casts}"


def _eqn(fn: Callable[..., Any], *args: Any) -> Any:
    return lambda: equation(fn, *(args or (X,)))


BINARY = {
    "add": _eqn(lax.add, X, X), "sub": _eqn(lax.sub, X, X), "mul": _eqn(lax.mul, X, X), "div": _eqn(lax.div, X, X),
    "max": _eqn(lax.max, X, X), "pow": _eqn(lax.pow, X, X), "gt": _eqn(lax.gt, X, X),
    "rem": _eqn(lax.rem, X, X), "concatenate": _eqn(lambda x, y: lax.concatenate([x, y], 1), X[:, :8], X[:, :8]),
}  # fmt: skip
UNARY = {
    "exp": _eqn(lax.exp), "sqrt": _eqn(lax.sqrt), "rsqrt": _eqn(lax.rsqrt), "square": _eqn(lax.square),
    "neg": _eqn(lax.neg), "tanh": _eqn(lax.tanh), "sign": _eqn(lax.sign), "floor": _eqn(lax.floor),
    "is_finite": _eqn(lax.is_finite),
    "sum of all": _eqn(lambda x: lax.reduce_sum(x, (0, 1))),
    "sum of 16": _eqn(lambda x: lax.reduce_sum(x, (1,))),
    "sum of 4": _eqn(lambda x: lax.reduce_sum(x, (0,))),
    "cumsum": _eqn(lax.cumsum), "reduce_max": _eqn(lambda x: lax.reduce_max(x, (1,))),
    "argmax": _eqn(lambda x: lax.argmax(x, 1, jnp.int32)), "sort": _eqn(lambda x: lax.sort(x)),
    "reshape": _eqn(lambda x: lax.reshape(x, (64,))), "slice": _eqn(lambda x: x[:2]),
    "broadcast by 7": _eqn(lambda x: lax.broadcast(x, (7,))), "broadcast by 8": _eqn(lambda x: lax.broadcast(x, (8,))),
    "cholesky": _eqn(lax.linalg.cholesky, jnp.ones((8, 8))),
    "to float16": _eqn(lambda x: x.astype(jnp.float16)), "to bfloat16": _eqn(lambda x: x.astype(jnp.bfloat16)),
    "to int32": _eqn(lambda x: x.astype(jnp.int32)),
    "reduce_precision": _eqn(lambda x: lax.reduce_precision(x, 5, 10)),
    "to half and back": _eqn(lambda x: x.astype(jnp.float32), X.astype(jnp.float16)),
    "from integers": _eqn(lambda x: x.astype(jnp.float32), X.astype(jnp.int32)),
}  # fmt: skip


def _table(title: str, rows: dict[str, list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows.values(), strict=True)]
    lines = (" ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows.values())
    return "\n".join([title, *(f"  {name:9}{line}".rstrip() for name, line in zip(rows, lines, strict=True))]) + "\n"


def _of_two(eqn: Any) -> str:
    """A table a level: how each state meets each."""
    tables = []
    for level, want in WANTED:
        rows = {
            row: [
                _cell(decide(eqn, (state, other), level, want)) if state or other else "" for other in STATES.values()
            ]
            for row, state in STATES.items()
        }
        tables.append(_table(f"{level}, wanted in {want.name.lower()}", rows))
    return "".join(tables)


def _of_one(level: str) -> str:
    """What comes out of each operation, for each state."""
    eqns = {name: make() for name, make in UNARY.items()}
    tables = []
    for want in (Want.HALF, Want.FULL):
        rows = {"": list(eqns)}
        for row, state in STATES.items():
            rows[row] = [
                _cell(decide(eqn, (state,), level, want)) if _fits(eqn, state) else "" for eqn in eqns.values()
            ]
        tables.append(_table(f"{level}, wanted in {want.name.lower()}", rows))
    return "".join(tables)


def _fits(eqn: Any, state: Flow | None) -> bool:
    """Whether an operand may be in a state: integers have none, and the user's own half data is half."""
    dtype = eqn.invars[0].aval.dtype
    if state is None or dtype == jnp.int32:
        return state is None and dtype == jnp.int32
    return dtype != FLOAT16 or state.kind == Kind.HALF


TABLES = {name: lambda make=make: _of_two(make()) for name, make in BINARY.items()}
TABLES |= {f"one_operand_{level}": lambda level=level: _of_one(level) for level in REGIMES}


@pytest.mark.parametrize("name", TABLES)
def test_decisions(name):
    path, text = FOLDER / f"{name}.txt", TABLES[name]()
    if os.environ.get("JAMP_UPDATE_PLANS"):
        path.write_text(text)
    assert text == path.read_text()


def test_there_is_a_table_for_each_file():
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == sorted(TABLES)
