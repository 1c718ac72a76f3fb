"""Imports inside jamp run one way, and what may be imported where is settled; this fails on an arrow backwards."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import jamp

PACKAGE = Path(jamp.__file__).parent

# A part may import itself and the parts before it. `inspect` is the last, so nothing reads it but the front page.
LAYERS = (
    "_compat", "_dtypes", "_primitives", "_tree", "_warnings", "_policy", "policy", "transforms", "scalers", "optim", "inspect",
    "__init__",
)  # fmt: skip

# External modules that one part alone may import.
ONLY_IN = {"optax": ("optim", "inspect"), "jax._src": ("_compat",), "jaxlib": ("_compat",)}
NEVER = ("chex", "equinox", "flax", "haiku", "jmp", "keras", "torch")


def imported_modules(source: str) -> Iterator[str]:
    """Full names of what a module imports anywhere in it, functions and `if TYPE_CHECKING` included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "jamp imports by absolute names"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(module_path: str) -> str:
    """`policy/_rule.py` belongs to `policy`, `_tree.py` to `_tree`."""
    return Path(module_path).parts[0].removesuffix(".py")


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(sources: Mapping[str, str]) -> list[str]:
    """Imports that are not allowed, for the sources of a package by path inside it."""
    found = []
    for path, source in sources.items():
        part = part_of(path)
        if part not in LAYERS:
            found.append(f"{path} belongs to no layer")
            continue
        allowed = LAYERS[: LAYERS.index(part) + 1]
        for name in imported_modules(source):
            # `from jamp import x` reads the front page, which is the last layer of all.
            inner = name.split(".")[1] if name.startswith("jamp.") else None
            if is_within(name, "jamp") and (inner or "__init__") not in allowed:
                found.append(f"{path} imports {name}")
            for package, parts in ONLY_IN.items():
                if is_within(name, package) and part not in parts:
                    found.append(f"{path} imports {name}")
            found += [f"{path} imports {name}" for package in NEVER if is_within(name, package)]
    return found


def test_imports_run_one_way():
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert len(sources) > 5
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("path", "source", "finds"),
    [
        ("policy.py", "from jamp.transforms import cast_fn", "imports jamp.transforms.cast_fn"),
        ("_tree.py", "def f():\n    import jamp.policy", "imports jamp.policy"),
        ("scalers/_base.py", "from jamp import get_policy", "imports jamp.get_policy"),
        ("scalers/_base.py", "import jamp", "imports jamp"),
        ("optim/_x.py", "from jamp.inspect._report import report", "imports jamp.inspect._report.report"),
        ("scalers/_base.py", "import optax", "imports optax"),
        ("optim/_x.py", "from jax._src import core", "imports jax._src.core"),
        ("inspect/_x.py", "from flax import linen", "imports flax.linen"),
        ("helpers.py", "", "belongs to no layer"),
    ],
)
def test_the_checker_finds_a_planted_import(path, source, finds):
    (found,) = violations({path: source})
    assert found == f"{path} {finds}"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("optim/_x.py", "import optax\nfrom jamp.scalers import grad\nfrom jamp._compat import x"),
        ("inspect/_x.py", "from jamp.optim import loss_scale"),
        ("policy.py", "from jamp._policy.rule import Rule\nimport jax.numpy as jnp"),
        ("_compat.py", "from jax._src import core"),
        ("__init__.py", "from jamp.inspect import report as report"),
    ],
)
def test_the_checker_lets_pass_what_is_allowed(path, source):
    assert violations({path: source}) == []
