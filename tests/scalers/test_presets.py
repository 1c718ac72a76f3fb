"""Presets against the published rules of the frameworks, written again in plain Python, over random runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jamp

TOP, TINY = 2.0**126, 2.0**-126


@dataclasses.dataclass
class Rule:
    """A framework's scaler in its own terms. `window` is its growth interval, shortened for the test."""

    scale: float
    window: int
    count: int = 0

    def grow_if_float32_can(self):
        if self.scale * 2 <= TOP:
            self.scale *= 2


class PyTorch(Rule):
    def update(self, found_inf):
        if found_inf:
            self.scale, self.count = max(self.scale * 0.5, TINY), 0
            return
        self.count += 1
        if self.count == self.window:
            self.grow_if_float32_can()
            self.count = 0


class Keras(Rule):
    def update(self, found_inf):
        if found_inf:
            self.scale, self.count = max(self.scale * 0.5, TINY), 0
        elif self.count == self.window - 1:
            self.grow_if_float32_can()
            self.count = 0
        else:
            self.count += 1


class MegEngine(Rule):
    def update(self, found_inf):
        if found_inf:
            self.scale, self.count = max(self.scale * 0.5, TINY), 0
        else:
            self.count += 1
            if self.count >= self.window:
                self.grow_if_float32_can()
                self.count = 0


class MindSpore(Rule):
    def update(self, found_inf):
        if not found_inf and self.count == self.window - 1:
            self.grow_if_float32_can()
        if found_inf:
            self.scale = max(1.0, self.scale / 2)
        self.count = ((self.count + 1) % self.window) * (not found_inf)


class Apex(Rule):
    def update(self, found_inf):
        if found_inf:
            self.scale, self.count = max(self.scale / 2, TINY), 0
        else:
            self.count += 1
        if self.count == self.window:
            self.scale, self.count = min(2.0**24, self.scale * 2), 0


@dataclasses.dataclass
class MXNet(Rule):
    waiting: float | None = None

    def update(self, found_inf):
        self.scale = self.waiting or self.scale
        self.waiting = self.scale
        if found_inf:
            self.waiting, self.count = max(self.scale / 2, TINY), 0
        else:
            self.count += 1
        if self.count == self.window:
            self.waiting, self.count = min(2.0**24, self.scale * 2), 0


@dataclasses.dataclass
class Paddle(Rule):
    every_n: int = 1
    bad: int = 0

    def update(self, found_inf):
        if found_inf:
            self.count, self.bad = 0, self.bad + 1
            if self.bad == self.every_n:
                self.scale, self.bad = max(self.scale * 0.5, TINY), 0
        else:
            self.count, self.bad = self.count + 1, 0
            if self.count == self.window:
                self.grow_if_float32_can()
                self.count = 0


@dataclasses.dataclass
class DeepSpeed(Rule):
    hysteresis: int = 2
    consecutive: bool = False
    iteration: int = 0
    last_overflow: int = -1
    left: int | None = None

    def update(self, found_inf):
        self.left = self.hysteresis if self.left is None else self.left
        if found_inf:
            if self.left == 1:
                self.scale = max(self.scale / 2, 1.0)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive:
                self.left = self.hysteresis
            if (self.iteration - self.last_overflow) % self.window == 0:
                self.left = self.hysteresis
                self.grow_if_float32_can()
        self.iteration += 1


@dataclasses.dataclass
class Megatron(Rule):
    left: int = 2

    def update(self, found_inf):
        if found_inf:
            self.count, self.left = 0, self.left - 1
            if self.left <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
            return
        self.count += 1
        if self.count == self.window:
            self.count, self.left = 0, 2
            self.grow_if_float32_can()


# Name of the preset, its rule, the published initial scale and interval, and overrides.
CASES = {
    "pytorch": ("pytorch", PyTorch, 2.0**16, 2000, {}, {}),
    "keras": ("keras", Keras, 2.0**15, 2000, {}, {}),
    "megengine": ("megengine", MegEngine, 2.0**4, 2000, {}, {}),
    "mindspore": ("mindspore", MindSpore, 2.0**24, 2000, {}, {}),
    "apex": ("apex", Apex, 2.0**16, 2000, {}, {}),
    "mxnet": ("mxnet", MXNet, 2.0**16, 2000, {}, {}),
    "paddle": ("paddle", Paddle, 2.0**16, 2000, {}, {}),
    "paddle, two in a row": ("paddle", Paddle, 2.0**16, 2000, {"hysteresis": 2}, {"every_n": 2}),
    "deepspeed": ("deepspeed", DeepSpeed, 2.0**16, 1000, {}, {}),
    "deepspeed, consecutive": (
        "deepspeed", DeepSpeed, 2.0**16, 1000, {"hysteresis_refill": "finite"}, {"consecutive": True}),
    "megatron": ("megatron", Megatron, 2.0**32, 1000, {}, {}),
}  # fmt: skip
cases = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))

# Runs of finite steps and of overflows, as training has them: a sequence of coin flips would never grow far.
runs = st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=25)


@jax.jit
def trajectory(scaler, finite):
    return lax.scan(lambda s, flag: (s.adjust(flag), s.adjust(flag).loss_scale), scaler, finite)[1]


@cases
def test_published_defaults(case):
    name, _, scale, window, overrides, _ = case
    scaler = jamp.DynamicLossScale.preset(name, **overrides)
    assert (scaler.loss_scale, scaler.period) == (scale, window)


@pytest.mark.in_turns(3)
@cases
@given(runs=runs, window=st.integers(1, 5), exponent=st.none() | st.integers(0, 20))
@settings(max_examples=25, deadline=None)
def test_step_for_step(case, runs, window, exponent):
    name, rule, scale, _, overrides, arguments = case
    scale = scale if exponent is None else 2.0**exponent
    finite = [flag for flag, length in runs for _ in range(length)]
    published = rule(scale, window, **arguments)
    expected = []
    for flag in finite:
        published.update(not flag)
        expected.append(published.scale)
    scaler = jamp.DynamicLossScale.preset(name, **{"loss_scale": scale, "period": window, **overrides})
    padded = np.ones(300, bool)  # One shape, so that the scan is compiled once per window.
    padded[: len(finite)] = finite
    assert trajectory(scaler, jnp.asarray(padded))[: len(finite)].tolist() == expected


@pytest.mark.parametrize("name", ["pytorch", "paddle", "megengine", "keras", "mxnet", "apex"])
def test_where_the_framework_has_no_floor_the_scale_stays_alive(name):
    scaler = jamp.DynamicLossScale.preset(name)
    used = trajectory(scaler, jnp.zeros(300, bool))
    assert used[-1] == TINY and (used > 0).all()


@pytest.mark.parametrize("name", ["pytorch", "paddle", "megengine", "keras", "mindspore", "deepspeed", "megatron"])
def test_where_the_framework_has_no_cap_the_scale_stays_finite(name):
    scaler = jamp.DynamicLossScale.preset(name, period=1)
    used = trajectory(scaler, jnp.ones(300, bool))
    assert used[-1] == TOP


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"'pytroch'.*expected one of pytorch.*Did you mean 'pytorch'"):
        jamp.DynamicLossScale.preset("pytroch")
    with pytest.raises(ValueError, match=r"'growth_interval' \(here `period`\)\. Expected are loss_scale, counter"):
        jamp.DynamicLossScale.preset("pytorch", growth_interval=3)
