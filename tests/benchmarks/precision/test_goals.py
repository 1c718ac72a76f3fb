"""What is float32 on purpose misses no goal, and everything else does."""

import pytest

from benchmarks.precision.goals import KEPT, precision_goals
from benchmarks.precision.instruments import Measurement


def _shares(half: float, name: str) -> dict:
    goals = precision_goals({name: {"jamp": Measurement(half_forward=half, half_backward=1.0)}})
    return {goal.name: goal for goal in goals if goal.name.startswith("FLOPs")}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_on_purpose_misses_no_goal(name):
    (goal,) = _shares(1 - 0.99 * KEPT[name] / 100, name).values()
    assert goal.passed


@pytest.mark.parametrize(("name", "half"), [("linen/lm", 0.99), ("diffrax/neural_ode_fixed", 0.9)])
def test_anything_more_misses_it(name, half):
    (goal,) = _shares(half, name).values()
    assert not goal.passed
    assert name in goal.worst
