"""Checks the types of users' programs: the code of README and documentation, an annotated program, all public names.

    python -m tools.docs_types

Every section of a page becomes a module. It imports what it uses of the sections before it, and has the lines that it
has in the page. Of a page with content tabs there is one for each tab. Pyright and mypy run once each over all of them,
in their strict modes. A page does not annotate its functions, so what asks for annotations is left out.
"""

import ast
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jamp
from tests.docs.pages import PAGES, ROOT, blocks, tabs

ANNOTATED = ROOT / "tests" / "typing" / "user_code.py"  # In all its types, so that nothing is left out there.

# Pages are allowed not to annotate. `misc` is what mypy says of `nnx.split(model, nnx.Param, ...)`.
_MYPY = """
[mypy]
strict = true
follow_imports = silent
disable_error_code = import-untyped, var-annotated, misc
allow_subclassing_any = true
allow_untyped_decorators = true
allow_untyped_defs = true
allow_untyped_calls = true
allow_incomplete_defs = true
allow_redefinition = true
implicit_reexport = true
warn_unused_ignores = false

[mypy-user_code]
enable_error_code = var-annotated, misc
disallow_untyped_defs = true
disallow_untyped_calls = true
disallow_incomplete_defs = true
allow_redefinition = false
implicit_reexport = false
warn_unused_ignores = true
"""

# JAX's own functions are partly unknown to pyright, and optax has no types.
_PYRIGHT = {"typeCheckingMode": "strict", "reportMissingTypeStubs": False, "reportUnknownMemberType": False}
_NOT_OF_PAGES = (
    "reportUnknownArgumentType", "reportUnknownLambdaType", "reportUnknownParameterType", "reportUnknownVariableType",
    "reportMissingParameterType", "reportUntypedFunctionDecorator",
    "reportUnusedImport",  # A later section uses it.
    "reportPossiblyUnboundVariable",  # What a loop binds, which runs at least once.
)  # fmt: skip
_HEADER = "# pyright: " + ", ".join(f"{rule}=false" for rule in _NOT_OF_PAGES)

# Types of other libraries that no program gets by without a cast: what `model.apply` of Flax linen returns, with or
# without variables that changed, and what `optax.apply_updates` does. An error in whose line they stand is theirs.
_NOT_OURS = re.compile("FrozenDict|FrozenVariableDict|ArrayTree")

# Libraries whose annotations contradict their documentation: `verbose: str` for `fit(verbose=0)`.
_UNTYPED = ("haiku", "keras")
_STUB = """# pyright: reportIncompleteStub=false
from typing import Any
def __getattr__(name: str) -> Any: ...
"""

_HEADING = re.compile(r"^#+ ", re.MULTILINE)


def programs(pages: list[Path] = PAGES) -> dict[str, tuple[str, str]]:
    """The sections of pages by the names of their modules: the page, and the code with the lines of the page."""
    found = {}
    for page in pages:
        name, text = str(page.relative_to(ROOT)), page.read_text()
        for tab in tabs(text):
            stem = "page_" + re.sub(r"\W+", "_", f"{name.removesuffix('.md')} {tab or ''}").strip("_").lower()
            found |= {module: (name, code) for module, code in modules(text, tab, stem).items()}
    return found


def modules(text: str, tab: str | None, stem: str) -> dict[str, str]:
    """The sections of a page by the names of their modules."""
    found = {}
    homes: dict[str, str] = {}  # Where a name was last bound.
    for number, code in enumerate(_sections(text, tab)):
        module = f"{stem}_{number}"
        used, bound = _names(code)
        imports = "".join(f"from {homes[n]} import {n} as {n}; " for n in sorted(used & homes.keys()))
        assert code.startswith("\n\n"), "Two lines are in front of any code: a heading, or a fence and an empty one."
        found[module] = f"{_HEADER}\n{imports}\n{code[2:]}"
        homes |= dict.fromkeys(bound, module)
    return found


def _sections(text: str, tab: str | None) -> Iterator[str]:
    """The code between two headings, below as many empty lines as there are in front of it in the page."""
    starts = [match.start() for match in _HEADING.finditer(_without_code(text))] + [len(text)]
    lines_at = [text.count("\n", 0, start) for start in starts]
    run = [block for block in blocks(text) if not block.reason_not_run and block.tab in (None, tab)]
    for first, last in zip([0, *lines_at], lines_at, strict=False):
        lines: list[str] = []
        for block in run:
            if first < block.line <= last:
                lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
        if lines:
            yield "\n".join(lines) + "\n"


def _without_code(text: str) -> str:
    """The page with its blocks blanked: a comment in Python looks like a heading."""
    return re.sub(r"^( *)```.*?^\1```$", lambda m: re.sub(r"\S", " ", m[0]), text, flags=re.DOTALL | re.MULTILINE)


def _names(code: str) -> tuple[set[str], set[str]]:
    """The names that a module reads before it binds them, and those that it binds."""
    used: set[str] = set()
    bound: set[str] = set()
    for statement in ast.parse(code).body:
        nodes = list(ast.walk(statement))
        used |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - bound
        bound |= _bound(statement)
    return used, bound


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in statement.names}
    children = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    nodes = list(ast.walk(statement))
    own = {id(n) for each in nodes if isinstance(each, ast.comprehension) for n in ast.walk(each.target)}
    targets = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and id(n) not in own}
    return targets.union(*map(_bound, children))


def public_names() -> str:
    """A program that reads every public name, and every public attribute of a class, each of which has a known type."""
    lines = ["# pyright: reportUnknownMemberType=true, reportUnusedExpression=false", "import jamp"]
    for name in (name for name in dir(jamp) if not name.startswith("_")):
        value = getattr(jamp, name)
        # A class has no property of its own where it is a protocol.
        attributes = vars(value) if isinstance(value, type) and not getattr(value, "_is_protocol", False) else ()
        lines += [f"jamp.{name}", *(f"jamp.{name}.{attribute}" for attribute in attributes if attribute[0] != "_")]
    return "\n".join(lines) + "\n"


def mypy(folder: Path) -> list[str]:
    """Runs mypy on all programs of a folder, and returns its errors, one a line."""
    (folder / "mypy.ini").write_text(_MYPY)
    names = [path.name for path in folder.glob("*.py")]
    command = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", f"--cache-dir={ROOT / '.mypy_cache'}", *names]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if ": error:" in line]


def pyright(folder: Path) -> list[str]:
    """Runs pyright on all programs of a folder, and returns its errors as mypy prints them."""
    (folder / "pyrightconfig.json").write_text(json.dumps(_PYRIGHT | {"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(folder), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout + done.stderr)
    return [
        f"{Path(found['file']).name}:{found['range']['start']['line'] + 1}: error: {found['message']}"
        f"  [{found.get('rule', '')}]"
        for found in json.loads(done.stdout)["generalDiagnostics"]
        if found["severity"] == "error"
    ]


def main() -> None:
    """Checks all programs, prints what is wrong at its line of the page, and fails if anything is."""
    pages = programs()
    with tempfile.TemporaryDirectory() as temporary, concurrent.futures.ThreadPoolExecutor() as pool:
        folder = Path(temporary)
        (folder / ANNOTATED.name).write_text(ANNOTATED.read_text())
        (folder / "public_names.py").write_text(public_names())
        for module, (_, code) in pages.items():
            (folder / f"{module}.py").write_text(code)
        for library in _UNTYPED:
            (folder / f"{library}.pyi").write_text(_STUB)
        checks = [pool.submit(check, folder) for check in (mypy, pyright)]
        errors = [error.partition(": error: ") for check in checks for error in check.result()]
    not_ours = {place for place, _, message in errors if place.startswith("page_") and _NOT_OURS.search(message)}
    # Twice where several tabs have it.
    left = dict.fromkeys((_in_page(place, pages), message) for place, _, message in errors if place not in not_ours)
    for place, message in left:
        print(f"{place}: error: {message}")
    print(f"{len(pages)} programs of the documentation, {len(left)} errors")
    sys.exit(bool(left))


def _in_page(place: str, pages: dict[str, tuple[str, str]]) -> str:
    module, _, line = place.partition(".py:")
    return f"{pages[module][0]}:{line}" if module in pages else place


if __name__ == "__main__":
    main()
