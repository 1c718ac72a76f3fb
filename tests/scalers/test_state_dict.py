"""The dicts that PyTorch's, Paddle's and MegEngine's scalers save."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jamp

PYTORCH = {"scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}
MEGENGINE = {"scale_factor": 16.0} | {key: value for key, value in PYTORCH.items() if key != "scale"}
PADDLE = {
    "scale": 4096.0, "incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": 2000, "decr_every_n_nan_or_inf": 2,
    "incr_count": 7, "decr_count": 1, "use_dynamic_loss_scaling": True}  # fmt: skip
SAVED = {"pytorch": PYTORCH, "megengine": MEGENGINE, "paddle": PADDLE}
read = jamp.DynamicLossScale.from_state_dict


@pytest.mark.parametrize("format", SAVED)
def test_reads_what_it_writes_and_writes_what_it_reads(format):
    scaler = read(SAVED[format], format=format)
    written = scaler.to_state_dict(format=format)
    assert written == SAVED[format]
    assert json.loads(json.dumps(written)) == written
    assert [type(v) for v in written.values()] == [type(v) for v in SAVED[format].values()]
    assert read(written) == scaler, "the format is told from the keys"


@pytest.mark.parametrize("format", SAVED)
def test_goes_on_where_the_other_framework_stopped(format):
    scaler = read({**SAVED[format], next(k for k in SAVED[format] if "_interval" in k or "every_n_steps" in k): 8})
    assert scaler.counter == 7
    assert scaler.adjust(True).loss_scale == 2 * SAVED[format].get("scale", 16.0)


def test_paddle_counts_overflows():
    scaler = read(PADDLE)
    assert scaler.overflows == 1 and scaler.adjust(False).loss_scale == 2048.0
    assert read({**PADDLE, "decr_every_n_nan_or_inf": 1, "decr_count": 0}).overflows is None


def test_arrays_of_one_element_are_numbers():
    assert read({**PADDLE, "scale": np.array([4096.0], np.float32)}) == read(PADDLE)
    assert read({**PYTORCH, "scale": jnp.float32(4096), "_growth_tracker": np.int32(7)}) == read(PYTORCH)


def test_scalers_that_do_not_adapt():
    assert read({**MEGENGINE, "growth_interval": 0}) == jamp.StaticLossScale(16.0)
    assert read({**PADDLE, "use_dynamic_loss_scaling": False}) == jamp.StaticLossScale(4096.0)
    assert read({}) == jamp.NoOpLossScale()


@pytest.mark.parametrize("scaler", [jamp.StaticLossScale(4096.0), jamp.NoOpLossScale()])
@pytest.mark.parametrize("format", ["jamp", "paddle", "megengine"])
def test_what_does_not_adapt_is_written_too(scaler, format):
    written = json.loads(json.dumps(scaler.to_state_dict(format)))
    assert read(written) == scaler
    if written and format != "jamp":
        assert list(written) == list(SAVED[format])
    with pytest.raises(ValueError, match="cannot hold a scale that does not adapt"):
        jamp.StaticLossScale(2.0).to_state_dict("pytorch")


def test_limits_are_those_of_the_other_framework():
    assert read({**PYTORCH, "scale": 2.0**40}).loss_scale == 2.0**40
    assert read({**PYTORCH, "scale": 2.0**-40}).loss_scale == 2.0**-40


def test_default_backoff_is_written_as_a_number():
    assert jamp.DynamicLossScale(8.0, factor=4).to_state_dict("pytorch")["backoff_factor"] == 0.25


def test_refuses_other_keys():
    with pytest.raises(ValueError, match=r"expected the keys.*growth_factor.*got"):
        read({"scale": 1.0}, format="pytorch")
    with pytest.raises(ValueError, match="No loss scaler saves a dict with the keys"):
        read({"loss_scale": 1.0, "unskipped": 3})
    with pytest.raises(ValueError, match="Unknown format 'torch'"):
        read(PYTORCH, format="torch")


@pytest.mark.parametrize(
    ("format", "settings"),
    [
        ("pytorch", {"hysteresis": 2}),
        ("megengine", {"hysteresis": 2, "hysteresis_refill": "backoff"}),
        ("paddle", {"hysteresis": 2}),
        ("paddle", {"delayed": True}),
    ],
)
def test_refuses_to_write_what_the_format_cannot_hold(format, settings):
    with pytest.raises(ValueError, match=f"{format!r} format cannot hold"):
        jamp.DynamicLossScale(8.0, **settings).to_state_dict(format)


@pytest.mark.parametrize("wrong", [None, [], 0, "scaler.json"])
def test_what_is_no_dict_is_no_disabled_scaler(wrong):
    with pytest.raises(TypeError, match="expected the dict that"):
        jamp.DynamicLossScale.from_state_dict(wrong)
