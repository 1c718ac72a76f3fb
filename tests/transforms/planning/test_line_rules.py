"""Rules by source line."""

import jax
import jax.numpy as jnp
import pytest

import jamp


def two_products(x):
    y = x @ x
    return y @ x


LINE = two_products.__code__.co_firstlineno + 2


def dtypes(entry):
    policy = jamp.get_policy("O2:bfloat16").with_rules(full=entry)
    assert jamp.get_policy(str(policy)) == policy
    found = jamp.report(two_products, jnp.ones((4, 4)), policy=policy)
    return [op.inputs[0] for op in found.operations if op.primitive == "dot_general"], found.unmatched


def test_a_line_takes_one_operation_out():
    assert dtypes(f"test_line_rules.py:{LINE}") == (["bfloat16", "float32"], ())
    assert dtypes(f"planning/test_line_rules.py:{LINE}") == (["bfloat16", "float32"], ())


def test_a_primitive_at_a_line():
    def residual(x):
        return x + jnp.tanh(x) @ x

    def rules(entry):
        policy = jamp.get_policy("O3:bfloat16").with_rules(full=entry)
        assert jamp.get_policy(str(policy)) == policy
        found = jamp.report(residual, jnp.ones((4, 4)), policy=policy)
        return {op.primitive for op in found.operations if op.inputs[0] == "float32"}, found.unmatched

    line = f"test_line_rules.py:{residual.__code__.co_firstlineno + 1}"
    assert rules(line)[0] == {"add", "tanh", "dot_general"}
    assert rules(f"add at {line}") == ({"add"}, ())
    assert rules(f"add at {line} from nowhere.py:1") == (set(), (f"add at {line} from nowhere.py:1",))
    assert rules(f"sub at {line}") == (set(), (f"sub at {line}",))
    with pytest.raises(ValueError, match="'ad' is no primitive of jax"):
        rules(f"ad at {line}")


def test_a_line_that_is_not_there_is_told():
    entry = f"rules.py:{LINE}"
    assert dtypes(entry) == (["bfloat16", "bfloat16"], (entry,))


def test_a_line_covers_what_is_inside_of_calls():
    def fn(x):
        return jax.nn.softmax(x) * jax.jit(lambda x: x * 3.0)(x)

    line = f"test_line_rules.py:{fn.__code__.co_firstlineno + 1}"
    policy = jamp.get_policy("O3:bfloat16").with_rules(full=line)
    x = jnp.linspace(0, 1, 8)
    assert (jamp.cast_fn(fn, policy)(x) == fn(x)).all()


def test_a_line_and_a_mark_outweigh_the_scope_that_they_are_in():
    def marked(x):
        with jax.named_scope("part"):
            y = jnp.diff(jnp.cumsum(x * 5.0))
            return jamp.full_precision(jax.jit(lambda y: y * 3.0))(y)

    policy = jamp.get_policy("O3:bfloat16").with_rules(half=["*part*"])
    line = f"test_line_rules.py:{marked.__code__.co_firstlineno + 2}"
    found = jamp.report(marked, jnp.linspace(0, 1, 8), policy=policy.with_rules(full=[line]))
    assert {dtype for op in found.operations for dtype in op.outputs} == {"float32"}
    found = jamp.report(marked, jnp.linspace(0, 1, 8), policy=policy)
    assert [op.outputs for op in found.operations if op.primitive == "cumsum"] == [("bfloat16",)]


def product(x):
    return x @ x


def between(x):
    return product(x)


def three_products(x):
    y = between(x)
    y = between(y)
    return product(y)


def in_float32(**rules):
    policy = jamp.get_policy("O2:bfloat16").with_rules(**rules)
    assert jamp.get_policy(str(policy)) == policy
    found = jamp.report(three_products, jnp.ones((4, 4)), policy=policy)
    return sum(op.count for op in found.operations if op.primitive == "dot_general" and op.inputs[0] == "float32")


PRODUCT, BETWEEN, *CALLS = (
    f"test_line_rules.py:{fn.__code__.co_firstlineno + line}"
    for fn, line in [(product, 1), (between, 1), (three_products, 1), (three_products, 2), (three_products, 3)]
)


def test_a_line_may_be_ruled_for_one_of_its_callers():
    assert in_float32(full=PRODUCT) == 3
    assert [in_float32(full=f"{PRODUCT} from {call}") for call in CALLS] == [1, 1, 1]
    assert in_float32(full=[f"{PRODUCT} from {call}" for call in CALLS[:2]]) == 2
    assert in_float32(full=f"{PRODUCT} from {BETWEEN}") == 2
    assert in_float32(full=f"{PRODUCT} from {BETWEEN} from {CALLS[1]}") == 1
    assert in_float32(full=f"{PRODUCT} from {CALLS[1]} from {BETWEEN}") == 0
    assert in_float32(full=CALLS[2]) == 0  # That line only calls.


def test_one_caller_wins_over_all_of_them():
    assert in_float32(full=PRODUCT, half=f"{PRODUCT} from {CALLS[0]}") == 2
