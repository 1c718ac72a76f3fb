"""Policy strings in the words of other frameworks."""

import jax.numpy as jnp
import numpy as np
import pytest

import jamp


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("mixed_float16", "O2:float16"),
        ("mixed_bfloat16", "O2:bfloat16"),
        ("mixed_float16,o=float16", "O2:float16,o=float16"),
        ("fp16", "f16"),
        ("O2:fp16", "O2:float16"),
        ("auto:fp16", "O2:float16"),
        ("p=fp32,c=fp16,o=fp32", "p=f32,c=f16,o=f32"),
    ],
)
def test_spellings_of_other_frameworks(theirs, ours):
    assert jamp.get_policy(theirs) == jamp.get_policy(ours)


@pytest.mark.parametrize("name", ["pytorch", "paddle", "mindspore", "mxnet", "megengine", "apex"])
def test_presets_as_strings(name):
    assert jamp.get_policy(name) == jamp.Policy.preset(name)
    policy = jamp.get_policy(f"{name}:float16")
    assert policy.compute_dtype == "float16" and policy.full == jamp.Policy.preset(name).full
    assert jamp.get_policy(str(policy)) == policy


def test_rules_are_added_to_those_of_a_preset():
    policy = jamp.get_policy("pytorch:float16,full=['*lm_head*']")
    assert policy == jamp.get_policy("pytorch:float16").with_rules(full=["*lm_head*"])


def test_all_are_listed_where_levels_are():
    with pytest.raises(ValueError, match="mixed_float16") as error:
        jamp.get_policy("amp")
    assert all(word in str(error.value) for word in ("O2", "auto", "'pytorch'", "'apex'", "'fp16'"))
    with pytest.raises(ValueError, match="Did you mean 'pytorch'"):
        jamp.get_policy("torch")


@pytest.mark.parametrize(
    "spec", ["pytorch:bfloat16,matmul=float8", "apex,matmul=mxfp8", "O1,matmul=float8,half=['dot_general']"]
)
def test_a_list_that_takes_all_products_out_of_float8_is_told(spec):
    with pytest.raises(ValueError, match=r"has no product to act on: half=.*Write a level instead of a preset"):
        jamp.get_policy(spec)


def test_a_dtype_takes_none_of_its_own():
    with pytest.raises(ValueError, match="Write 'half' alone, or 'O2:bf16'"):
        jamp.get_policy("half:bf16")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("matmul=float8,grad_dtype=E5M2", "matmul=float8,grad_dtype=e5m2"),
        ("matmul=float8,grad_dtype=float8_e5m2", "matmul=float8,grad_dtype=e5m2"),
        ("matmul=float8,grad_dtype=float8_e4m3fn", "matmul=float8,grad_dtype=e4m3"),
        ("matmul=float8,weight_grad=bfloat16", "matmul=float8,weight_grad=half"),
        ("matmul=bf16", "matmul=half"),
        ("reduce=f32", "reduce=float32"),
        ("reduce=bf16", "reduce=half"),
    ],
)
def test_settings_that_are_dtypes_may_be_called_as_dtypes_are(theirs, ours):
    assert jamp.get_policy(f"O2:bfloat16,{theirs}") == jamp.get_policy(f"O2:bfloat16,{ours}")


@pytest.mark.parametrize("dtype", [jnp.float8_e5m2, np.dtype(jnp.float8_e5m2), "E5M2"])
def test_or_be_dtypes(dtype):
    made = jamp.Policy("f32", "bf16", "f32", level="O2", matmul="float8", grad_dtype=dtype, reduce=jnp.float32)
    assert made == jamp.get_policy("O2:bfloat16,matmul=float8,grad_dtype=e5m2,reduce=float32")


@pytest.mark.parametrize("setting", ["reduce=bf16", "weight_grad=bf16,matmul=float8", "grad_dtype=f16,matmul=float8"])
def test_another_half_dtype_than_the_levels_is_no_spelling(setting):
    with pytest.raises(ValueError, match="expected '"):
        jamp.get_policy(f"O2:float16,{setting}")


@pytest.mark.parametrize(("half", "matmul"), [("float8", "float8"), ("fp8", "float8"), ("mxfp8", "mxfp8")])
def test_eight_bits_are_no_half_dtype(half, matmul):
    with pytest.raises(ValueError, match=f"Write 'O2,matmul={matmul}'"):
        jamp.get_policy(f"O2:{half}")
