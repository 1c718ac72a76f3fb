"""The tools do the same whatever JAX is told of NaN and dtypes, and of functions without floating results."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp


def root(x):
    return jnp.sqrt(x - 10).sum()


X = np.ones(4, np.float32)
TOOLS = {
    "first_nonfinite": lambda: jamp.first_nonfinite(root, X, policy="O2:float16"),
    "compare": lambda: jamp.compare(root, X, policy="O2:float16").differences[0].nonfinite,
    "verify": lambda: str(jamp.verify(root, X, policy="O2:float16")),
    "error_sources": lambda: str(jamp.error_sources(root, X, policy="O2:float16")),
    "tune": lambda: str(jamp.tune(jnp.sqrt, X, policy="O3:float16", tolerance=1e-2)),
}


@pytest.mark.parametrize("setting", [jax.debug_nans, jax.debug_infs], ids=["debug_nans", "debug_infs"])
@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_tools_look_at_nan_where_jax_would_stop(tool, setting):
    expected = tool()
    with setting(True):
        assert tool() == expected


@pytest.mark.parametrize("mode", ["count", "largest"])
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.grad, jamp.cast_fn], ids=["plain", "grad", "cast"])
def test_numerics_are_checked_in_double_precision(wrap, mode):
    def fn(w, x):
        return jax.lax.scan(lambda x, _: (jnp.log(jnp.tanh(x @ w)), None), x, length=2)[0].mean()

    args = np.eye(4, dtype=np.float32), np.float32([[1, 2, 3, -4]])
    _, plain = jax.jit(jamp.check_numerics(wrap(fn), mode=mode))(*args)
    with jax.enable_x64(True):
        _, wide = jax.jit(jamp.check_numerics(wrap(fn), mode=mode))(*args)
    assert str(wide) == str(plain) and not wide.ok and "iteration 0" in str(wide)


@pytest.mark.parametrize("fn", [lambda x: (x * 2).sum(), lambda x: jnp.zeros(())], ids=["integers", "constant"])
def test_where_nothing_is_floating_all_is_finite(fn):
    _, numerics = jax.jit(jamp.check_numerics(fn))(np.arange(5))
    assert numerics.ok and str(numerics) == "all is finite" and numerics.operations == ()


def test_what_comes_in_and_goes_out_is_seen():
    _, numerics = jax.jit(jamp.check_numerics(lambda x: x))(np.float32([1, np.inf]))
    assert numerics.ok and int(numerics.reached) == 1 and "argument args[0]: 1 inf" in str(numerics)


def test_tune_needs_floating_results():
    with pytest.raises(TypeError, match=r"`jamp.tune` looks at floating results, and the function has none"):
        jamp.tune(lambda x: (x * 2).astype(int), X, policy="O2:float16", tolerance=1e-2)


@pytest.mark.filterwarnings("error")
def test_a_mean_of_nothing_has_sources_without_a_warning():
    found = jamp.error_sources(lambda x: (x @ jnp.ones((3, 4))).mean(), np.zeros((0, 3), np.float32), policy="O2")
    assert found.operations == ()


SOURCE = """import jax.numpy as jnp
def stream(w, x):
    return jnp.mean((x + 0.02 * jnp.tanh(x @ w) - x) * jnp.cos(x))
"""


@pytest.mark.parametrize("folder", ["MyDrive", "My Drive", "net[v1]", "made from it"])
def test_lines_of_files_in_any_folder_are_rules(folder, tmp_path):
    path = tmp_path / folder / "my net.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("net", path)
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)
    args = np.eye(8, dtype=np.float32), np.float32(np.arange(16).reshape(2, 8) / 3)
    for rule in (f"{folder}/my net.py:3", f"dot_general at {path}:3"):
        policy = jamp.get_policy("O3:bfloat16").with_rules(full=[rule])
        assert jamp.get_policy(str(policy)) == policy
        found = jamp.report(net.stream, *args, policy=policy)
        assert {op.inputs for op in found.operations if op.primitive == "dot_general"} == {("float32", "float32")}
        assert not found.unmatched
    assert jamp.tune(net.stream, *args, policy="O3:bfloat16", tolerance=1e-3).full


@pytest.mark.parametrize("tool", [jamp.report, jamp.compare, jamp.verify, jamp.error_sources, jamp.first_nonfinite])
def test_an_argument_named_policy_is_told_from_a_policy(tool):
    def act(x, policy):
        return (x @ policy).sum()

    with pytest.raises(TypeError, match=r"has an argument of that name.*functools\.partial\(fn, policy=\.\.\.\)"):
        tool(act, X, policy=jnp.ones((4, 4)))


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        (jamp.report, "compiled"),
        (jamp.compare, "reference"),
        (jamp.verify, "draws"),
        (jamp.verify, "tolerance"),
        (jamp.error_sources, "gradient"),
        (jamp.error_sources, "directions"),
    ],
)
def test_a_setting_is_told_from_an_argument_of_its_name(tool, name):
    function = f"def scaled(x, {name}=2.5): return (x @ x * {name}).sum()"
    vars_of_module: dict[str, object] = {}
    exec(function, vars_of_module)
    scaled = vars_of_module["scaled"]
    with pytest.raises(TypeError, match=rf"'{name}', and .* has an argument of that name: it cannot be told"):
        tool(scaled, X, **{name: 3.0})
    tool(scaled, X)
    tool(functools.partial(scaled, **{name: 3.0}), X)
    tool(scaled, X, 3.0, **({name: False} if name in ("compiled", "gradient") else {}), policy="O2")


def test_what_a_verification_finds_is_of_the_same_arguments():
    def scaled(x, directions, draws=1.0):
        return x @ x * directions + draws

    found = jamp.verify(scaled, X, directions=jnp.float32(1e-3), policy="O3:bfloat16", tolerance=1e-9)
    assert not found.ok
    assert found.sources
