"""Imports inside jamp run one way, and what may be imported where is settled; this fails on an arrow backwards."""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest

import jamp
from jamp._primitives import TABLE

PACKAGE = Path(jamp.__file__).parent

# A part may import itself and the parts before it. `inspect` is the last, so nothing reads it but the front page.
LAYERS = (
    "_compat", "_dtypes", "_shardings", "_calls", "_elsewhere", "_tree", "_warnings", "_primitives", "_policy",
    "policy", "transforms", "scalers", "optim", "inspect", "__init__",
)  # fmt: skip

# Inside of `transforms`, by folder: the folders that it may import besides itself. What plans and what emits never see
# each other; the files beside the folders join them, and of these the folders may import the labels alone.
WINGS = {
    "program": (),
    "analysis.reading": ("program",),
    "analysis.attention": ("program", "analysis.reading"),
    "analysis.loops": ("program", "analysis.reading"),
    "analysis.products": ("program", "analysis.reading"),
    "analysis": ("program",),
    "planning": ("program", "analysis"),
    "keeping": ("program",),
    "emission": ("program", "keeping"),
}
BESIDE = ("_labels",)

# External modules that one part alone may import.
ONLY_IN = {"optax": ("optim", "inspect"), "jax._src": ("_compat",), "jaxlib": ("_compat",)}
MOST_ANY = 150
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


def wing_violations(sources: Mapping[str, str]) -> list[str]:
    """Imports between the folders of `transforms` that are not allowed, for sources by path inside of it."""
    found = []
    for path, source in sources.items():
        wing = ".".join(Path(path).parts[:-1])
        if wing not in WINGS:
            if wing:
                found.append(f"{path} belongs to no folder")
            continue
        allowed = [f"jamp.transforms.{each}" for each in (wing, *WINGS[wing], *BESIDE)]
        for name in imported_modules(source):
            if name.startswith("jamp.transforms.") and not any(is_within(name, package) for package in allowed):
                found.append(f"{path} imports {name}")
    return found


def circles(sources: Mapping[str, str]) -> list[str]:
    """Files of a package that import themselves by way of others; what types alone need is no import."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    arrows = {
        module: {name for name in map(_module_in(modules), imported_modules(_run_code(sources[path]))) if name}
        for module, path in modules.items()
    }
    reached = dict(arrows)
    for _ in modules:
        reached = {module: found.union(*(reached[name] for name in found)) for module, found in reached.items()}
    return sorted(module for module, found in reached.items() if module in found)


def _module_in(modules: Mapping[str, str]) -> Callable[[str], str | None]:
    def of(name: str) -> str | None:
        """The file that `jamp.a.b.name` comes from."""
        inner = name.removeprefix("jamp.") if name.startswith("jamp.") else ""
        return next((found for found in (inner, inner.rpartition(".")[0]) if found in modules), None)

    return of


def _run_code(source: str) -> str:
    """A source without what stands under `if TYPE_CHECKING`."""
    tree = ast.parse(source)
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    return ast.unparse(tree)


def named_primitives(source: str, names: Collection[str]) -> list[str]:
    """Comparisons of a name with those of primitives: `eqn.primitive.name == "sub"`, `name in ("sub", "div")`.

    The names may stand in a constant: `_QUOTIENTS = {"div"}`. Dictionaries, which say what to do, are no comparisons.
    """
    tree, found = ast.parse(source), []
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        asks = any(getattr(side, "attr", getattr(side, "id", None)) == "name" for side in sides)
        said = [constants.get(getattr(side, "id", ""), side) for side in sides]
        words = {c.value for side in said for c in ast.walk(side) if isinstance(c, ast.Constant)}
        if asks and words & set(names):
            found.append(ast.unparse(node))
    return found


def sources_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}


def test_the_passes_of_transforms_import_one_way():
    sources = sources_of(PACKAGE / "transforms")
    assert {".".join(Path(path).parts[:-1]) for path in sources} > set(WINGS)
    assert wing_violations(sources) == []


def test_no_file_imports_itself_by_way_of_others():
    assert circles(sources_of(PACKAGE)) == []


def test_no_pass_compares_the_name_of_a_primitive():
    """What is known of primitives stands in the table, as rules and traits. The planner's dispatch is a dictionary."""
    sources = sources_of(PACKAGE / "transforms")
    found = {path: comparisons for path, source in sources.items() if (comparisons := named_primitives(source, TABLE))}
    assert found == {}


def test_transforms_say_their_types():
    count = sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for source in sources_of(PACKAGE / "transforms").values()
        for node in ast.walk(ast.parse(source))
    )
    assert count <= MOST_ANY


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("program/x.py", "from jamp.transforms.analysis.demand import Demand", True),
        ("planning/x.py", "from jamp.transforms.emission.execute import execute", True),
        ("emission/x.py", "from jamp.transforms.planning.site import Site", True),
        ("analysis/x.py", "from jamp.transforms.keeping.kept import KEEP", True),
        ("keeping/x.py", "def f():\n    from jamp.transforms._traced import Traced", True),
        ("analysis/reading/x.py", "from jamp.transforms.analysis.loops.sums import Sums", True),
        ("analysis/loops/x.py", "from jamp.transforms.analysis.demand import Demand", True),
        ("analysis/new/x.py", "", True),
        ("helpers/x.py", "", True),
        ("emission/x.py", "from jamp.transforms.keeping.kept import KEEP", False),
        ("planning/x.py", "from jamp.transforms.planning.site import Site", False),
        ("planning/x.py", "from jamp.transforms.analysis.loops.sums import Sums", False),
        ("analysis/demand.py", "from jamp.transforms.analysis.loops.sums import Sums", False),
        ("analysis/loops/x.py", "from jamp.transforms.analysis.reading.flat import Opened", False),
        ("emission/x.py", "from jamp.transforms._labels import is_labelling", False),
        ("_traced.py", "from jamp.transforms.planning.planner import Planner", False),
    ],
)
def test_the_checker_of_folders_finds_a_planted_import(path, source, found):
    assert bool(wing_violations({path: source})) == found


def test_the_checker_finds_a_circle():
    sources = {"a.py": "from jamp.b.c import f\nimport d", "b/c.py": "from jamp.d import g", "d.py": "import jamp.a"}
    assert circles(sources) == ["a", "b.c", "d"]
    assert circles({**sources, "d.py": "if TYPE_CHECKING:\n    import jamp.a"}) == []


def test_the_checker_finds_a_compared_name():
    assert named_primitives("if site.name in ('sub', 'div'): pass", ("sub",)) == ["site.name in ('sub', 'div')"]
    assert named_primitives("x = name == 'jit'", ("jit",)) == ["name == 'jit'"]
    assert named_primitives("_SUMS = {'add'}\nx = eqn.primitive.name in _SUMS", ("add",)) == [
        "eqn.primitive.name in _SUMS"
    ]
    assert named_primitives("x = root.role == 'stack' or name == 'mine'", ("stack",)) == []


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
