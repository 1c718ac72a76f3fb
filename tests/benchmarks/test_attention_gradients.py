"""Fused attention's gradients are at most 1.1 times as wrong as those of what is written."""

import pytest

from benchmarks.studies.attention_gradients import CASES, errors


@pytest.mark.parametrize(("name", "half"), [("plain", "float16"), ("causal", "bfloat16")])
def test_gradients_of_fused_attention(name, half):
    found = errors(CASES[name], half)
    assert (found["as written"] > 0).all()
    for form in ("fused, on CPUs", "kernel"):
        assert (found[form][1:] <= 1.1 * found["as written"][1:]).all(), found
