"""Policy strings in the words of other frameworks."""

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
