import inspect
import re
from importlib import metadata
from pathlib import Path

import jamp
from tests.helpers import run_python

# The contract, in the order of the documentation. Names may be added, none removed or renamed.
PUBLIC = {
    "Policy", "get_policy", "half_dtype",
    "cast_fn", "autocast", "full_precision", "half_precision", "disable",
    "cast_tree", "cast_to_half", "cast_to_full",
    "NoOpLossScale", "StaticLossScale", "DynamicLossScale",
    "all_finite", "select_tree", "value_and_grad", "grad",
    "scaled_value_and_grad", "loss_scale", "loss_scaled", "master_weights", "mixed_precision",
    "report",
}  # fmt: skip

FOLDERS = {"inspect", "optim", "policy", "scalers", "transforms"}


def public_names() -> set[str]:
    return {name for name, value in vars(jamp).items() if not name.startswith("_") and not inspect.ismodule(value)}


def test_every_name_of_the_contract_is_there():
    assert sorted(PUBLIC - public_names()) == []


def test_nothing_leaks():
    modules = {name for name, value in vars(jamp).items() if not name.startswith("_") and inspect.ismodule(value)}
    assert modules <= FOLDERS


def test_every_public_name_is_documented():
    assert [n for n in sorted(public_names()) if not inspect.getdoc(getattr(jamp, n))] == []


def test_every_public_name_is_on_the_page_of_the_api():
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^::: jamp\.(\w+)$", page, re.MULTILINE)) == sorted(public_names())


def test_every_name_of_the_contract_has_an_example():
    assert [n for n in sorted(PUBLIC & public_names()) if ">>> " not in inspect.getdoc(getattr(jamp, n))] == []


def test_every_public_method_is_documented():
    classes = [value for name in public_names() if inspect.isclass(value := getattr(jamp, name))]
    methods = [m for c in classes for n, m in vars(c).items() if not n.startswith("_") and inspect.isfunction(m)]
    assert [m.__qualname__ for m in methods if not inspect.getdoc(m)] == []


def test_front_page_only_re_exports():
    page = Path(jamp.__file__).read_text()
    names = re.findall(r"^from jamp\.?\S* import (\w+) as (\w+)$", page, re.MULTILINE)
    modules = {"inspect", "optim", "policy", "scalers", "transforms"}  # Which type checkers know by these lines alone.
    assert {a for a, b in names if a == b} == public_names() | modules


def test_version_is_the_distribution_s():
    assert jamp.__version__ == metadata.version("jamp-jax")


def test_import_without_the_distribution_says_so():
    code = """
import importlib.metadata as m
def missing(name): raise m.PackageNotFoundError(name)
m.version = missing
import jamp
print(jamp.__version__)
"""
    assert run_python(code) == "0.0.0+not.installed"


def test_import_touches_no_backend_and_no_model_library():
    code = """
import sys, jamp
from jax._src import xla_bridge
libraries = "chex equinox flax haiku jmp keras matplotlib sklearn torch".split()
print(xla_bridge.backends_are_initialized(), [n for n in libraries if n in sys.modules])
"""
    assert run_python(code) == "False []"
