import pytest

import jamp
from jamp._policy.presets import PRESETS

NAMES = ("pytorch", "paddle", "mindspore", "mxnet", "megengine", "apex")


def test_all_frameworks_are_there():
    assert tuple(PRESETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_preset_is_an_o1_policy_that_survives_str(name):
    policy = jamp.Policy.preset(name)
    assert policy.level == "O1"
    assert jamp.get_policy(str(policy)) == policy


@pytest.mark.parametrize("name", NAMES)
def test_what_every_framework_agrees_on(name):
    policy = jamp.Policy.preset(name)
    assert {"dot_general", "conv_general_dilated"} <= set(policy.half)
    assert {"exp", "log", "pow", "tan", "acos"} <= set(policy.full)


def test_where_frameworks_disagree():
    lists = {name: jamp.Policy.preset(name) for name in NAMES}
    assert [n for n in NAMES if "softmax" in lists[n].full] == ["pytorch", "paddle", "mindspore", "mxnet", "apex"]
    assert [n for n in NAMES if "div" in lists[n].full] == ["megengine"]
    assert [n for n in NAMES if "reduce_sum" not in lists[n].full] == ["megengine"]
    assert [n for n in NAMES if "log1p" in lists[n].promote] == ["paddle", "apex"]
    assert [n for n in NAMES if "sin" in lists[n].full] == ["megengine"]
    assert [n for n in NAMES if "elu" in lists[n].full] == ["mxnet"]
