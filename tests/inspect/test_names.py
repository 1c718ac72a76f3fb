"""Names that are shortened: of the width that there is, and different where they were."""

import pytest

from jamp.inspect._names import shortened

LETTERS = "abcdefghijkl"
ALIKE = {
    "in the middle": [f"encoder_stack/a_rather_long_block_name_{c}/self_attention_output" for c in LETTERS],
    "at the end": [f"a_rather_long_block_name_{c}" for c in LETTERS],
    "at the beginning": [f"{c}_attention_output_projection_of_the_encoder" for c in LETTERS],
    "by numbers": [f"['layer_{i}/very/long/name/of/a/parameter/kernel_{i}']" for i in range(40)],
}


@pytest.mark.parametrize("width", [12, 20, 32, 48])
@pytest.mark.parametrize("where", ALIKE)
def test_names_differ_and_fit(where, width):
    short = shortened(ALIKE[where], width)
    assert max(map(len, short)) <= width and len(set(short)) == len(short)
    assert all("…" in new for old, new in zip(ALIKE[where], short, strict=True) if len(old) > width)


def test_what_fits_is_left():
    assert shortened(["short", "a_name_that_is_long"], 12) == ["short", "a_nam…s_long"]
    assert shortened([], 5) == [] and shortened(["same" * 5] * 2, 7) == ["sam…ame"] * 2
