"""Changes a module in one place at a time, and counts how often the tests of its folder notice.

    python -m tools.mutants jamp/transforms/program/flow.py --tests tests/transforms/program

A mutant is killed if a test fails, or runs ten times as long as it should. Each runs in a process of its own that is
forked with JAX and pytest imported, so that most take a second. Mutants that compute the same, by other means, cannot
be killed; the goal is 95 %. Without arguments it runs what decides precision, which `MODULES` lists.
"""

import argparse
import contextlib
import gc
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import chex  # noqa: F401
import hypothesis  # noqa: F401
import jax.numpy  # noqa: F401
import optax  # noqa: F401
import pytest
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tools.mutants.changes import Mutant, mutants

MODULES: dict[str, list[str]] = {
    "jamp/_primitives.py": ["tests/test_primitive_laws.py", "tests/test_primitives.py"],
    **{
        f"jamp/transforms/program/{name}.py": [
            "tests/transforms/program/test_states.py",
            "tests/transforms/program/test_lattice.py",
            "tests/transforms/program/test_roots.py",
        ]
        for name in ("flow", "lattice", "marks")
    },
    "jamp/transforms/program/want.py": ["tests/transforms/program/test_lattice.py"],
    "jamp/transforms/analysis/regimes.py": ["tests/transforms/analysis/test_regimes.py"],
    "jamp/transforms/analysis/demand.py": [
        "tests/transforms/analysis/test_demand.py",
        "tests/transforms/analysis/products/test_differences.py",
    ],
    "jamp/transforms/analysis/readers.py": [
        "tests/transforms/analysis/test_demand.py",
        "tests/transforms/analysis/test_readers.py",
    ],
    "jamp/transforms/analysis/carries.py": [
        "tests/transforms/analysis/loops/test_wanted_of_carries.py",
        "tests/transforms/analysis/test_demand.py",
    ],
    "jamp/transforms/planning/frames.py": ["tests/transforms/planning/test_frame_marks.py"],
    "jamp/transforms/analysis/apart.py": [
        "tests/transforms/analysis/test_wanted_apart.py",
        "tests/transforms/analysis/test_wanted_near.py",
    ],
    **{
        f"jamp/transforms/planning/{name}.py": [
            "tests/transforms/planning/test_operations.py",
            "tests/transforms/planning/test_operation_rules.py",
            "tests/transforms/planning/test_additions.py",
            "tests/transforms/planning/test_plans.py",
        ]
        for name in ("operations", "elementwise", "moves")
    },
}
# Neither doctests, nor plugins that tests need not, nor long explanations of a failure that nobody reads.
_OPTIONS = (
    "-o", "addopts=", "--import-mode=importlib", "-x", "-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider",
    "-p", "no:unraisableexception", "-p", "no:threadexception",
)  # fmt: skip
TIMES = 10  # That a mutant may take, of what the tests take without one.


class _Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a source of ours."""

    def __init__(self, path: str, source: str) -> None:
        self.name = path.removesuffix(".py").replace("/", ".")
        self.path, self.source = path, source

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, self.path, "exec"), module.__dict__)


def _passes(path: str, source: str, tests: Sequence[str], limit: float | None = None) -> bool:
    """Whether tests pass with another source of a module, in a process of their own."""
    child = os.fork()
    if child == 0:
        sys.meta_path.insert(0, _Replaced(path, source))
        if limit is not None:
            signal.alarm(max(int(limit), 1))  # Ends the process.
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        gc.disable()  # It lives for a second.
        os._exit(int(pytest.main([*tests, *_OPTIONS])))
    return os.waitpid(child, 0)[1] == 0


def _prepare(folder: str) -> None:
    """What all processes have in common, done once: what pytest imports, and where compiled modules lie."""
    sys.dont_write_bytecode, sys.pycache_prefix = False, folder
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main(["--collect-only", *_OPTIONS, "tests/conftest.py"])
    gc.collect()
    gc.freeze()


def survivors(path: str, tests: Sequence[str], sample: int | None) -> tuple[int, list[Mutant]]:
    """How many mutants of a module were tried, and those that the tests let pass."""
    source = Path(path).read_text()
    found = list(mutants(source))
    if sample is not None and sample < len(found):
        found = random.Random(0).sample(found, sample)
    start = time.monotonic()
    if not _passes(path, source, tests):
        raise SystemExit(f"The tests {' '.join(tests)} fail without a mutant.")
    limit = TIMES * (time.monotonic() - start)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = pool.map(lambda mutant: _passes(path, mutant.source, tests, limit), found)
        ran = track(zip(found, passed, strict=True), path, len(found), transient=True)
        alive = sorted(mutant for mutant, survived in ran if survived)
    if not _passes(path, source, tests):  # Whatever was changed meanwhile killed all that came after it.
        raise SystemExit(f"The tests {' '.join(tests)} fail by now without a mutant.")
    return len(found), alive


def main() -> None:
    """Prints a table, and the mutants that survived; fails below the goal."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("module", nargs="?", help="path of the module; default all that decide precision")
    parser.add_argument("--tests", nargs="+", help="paths of its tests")
    parser.add_argument("--sample", type=int, help="try this many mutants of each module, the same in each run")
    parser.add_argument("--least", type=float, default=0.95, help="share to be killed (default: %(default)s)")
    args = parser.parse_args()
    if args.module and not (args.tests or args.module in MODULES):
        parser.error(f"name the tests of {args.module} by --tests")
    modules = {args.module: args.tests or MODULES[args.module]} if args.module else MODULES
    table = Table("module", "mutants", "killed", "share", "minutes")
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        _prepare(folder)
        for module, tests in modules.items():
            start = time.monotonic()
            tried, alive = survivors(module, tests, args.sample)
            for mutant in alive:
                print(f"{module}:{mutant.line}: {mutant.change}", flush=True)
            share, minutes = 1 - len(alive) / max(tried, 1), (time.monotonic() - start) / 60
            table.add_row(module, str(tried), str(tried - len(alive)), f"{share:.1%}", f"{minutes:.1f}")
            missed += [module] if share < args.least else []
    Console().print(table)
    if missed:
        sys.exit(f"Of {', '.join(missed)} less than {args.least:.0%} of the mutants are killed.")


if __name__ == "__main__":
    main()
