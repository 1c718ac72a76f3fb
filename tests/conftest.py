"""Set-up of every test: a CPU that passes for eight devices, and a random key."""

import itertools
import os
import zlib
from collections.abc import Iterator
from importlib.metadata import version

# All must be set before the first jax computation, so at the import of this file. YNNPACK of jaxlib 0.11 and 0.12 adds
# some products in bfloat16, by hand as at a policy, but not the same ones (docs/faq.md).
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        *os.environ.get("XLA_FLAGS", "").split(),
        "--xla_force_host_platform_device_count=8",
        *["--xla_cpu_experimental_ynn_fusion_type="] * version("jaxlib").startswith(("0.11.", "0.12.")),
    ]
)

import chex
import hypothesis
import jax
import pytest

pytest.register_assert_rewrite("tests.helpers")

# The same examples in every run, and no time limit on them: a busy machine is no failure. `make nightly` draws others.
hypothesis.settings.register_profile("jamp", deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", deadline=None, derandomize=False, max_examples=2000)
hypothesis.settings.load_profile("jamp")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds an option for runs that look at what one change of many touches, such as that of the newest jax."""
    parser.addoption("--every", type=int, default=1, help="of each test, the first case and one in so many others")
    parser.addoption("--tests", type=int, default=1, help="of the tests themselves, one in so many")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves most cases of a test marked `in_turns` to the night, and with `--every` those of all but `each_case`.

    A hash of its name tells which a case is, so that no parameter is left out in all of them. Of tests with one case,
    and of the first cases of others, `--tests` leaves out most in the same way.
    """
    begun: set[str] = set()
    for item in items:
        name, _, case = item.nodeid.partition("[")
        if name not in begun and zlib.crc32(name.encode()) % config.getoption("--tests"):
            item.add_marker(pytest.mark.nightly)
        mark = item.get_closest_marker("in_turns")
        every = config.getoption("--every") * (mark.args[0] if mark else 1)
        if name in begun and not item.get_closest_marker("each_case") and zlib.crc32(case.encode()) % every:
            item.add_marker(pytest.mark.nightly)
        begun.add(name)


@pytest.fixture
def key() -> jax.Array:
    """A typed random key, the same in every test."""
    return jax.random.key(0)


@pytest.fixture(autouse=True)
def traces_from_zero() -> None:
    """Lets `chex.assert_max_traces` count anew, which takes a function for the same in all cases of a test."""
    chex.clear_trace_counter()


# Every compiled program holds some memory maps, of which Linux gives a process 65,530: XLA aborts at the next one.
PROGRAMS_HELD = 75  # In tests. Those of tests/numerics hold 375 maps each.
_ran = itertools.count(1)


@pytest.fixture(autouse=True)
def few_compiled_programs() -> Iterator[None]:
    """Forgets compiled programs from time to time."""
    yield
    if next(_ran) % PROGRAMS_HELD == 0:
        jax.clear_caches()
