"""The tables of the precision benchmark."""

from benchmarks.precision.render import by_library, by_model


def measured(half, kept, error=0.01, seconds=1.0):
    shares = {"half_forward": 1.0, "half_backward": half}
    memory = {"kept_bytes": kept, "temp_bytes": 2 * kept}
    times = {"trace_seconds": seconds, "later_trace_seconds": seconds**2, "step_seconds": seconds / 10}
    return {**shares, **memory, **times, "gradient_error": error, "casts": 9, "shared_casts": 4}


FAILED = {"error": "TypeError: carry"}
STORED = {
    "device": "cpu",
    "jax": "0.10.2",
    "policy": "O2:bfloat16",
    "models": {
        "linen/lm": {
            "float32": measured(0.0, 8_000_000),
            "native": measured(1.0, 4_000_000, 0.02, 2.0),
            "jmp": measured(0.5, 6_000_000),
            "jamp": measured(1.0, 2_000_000, 0.01, 2.5),
        },
        "equinox/mlp": {"float32": measured(0.0, 4_000_000), "jmp": FAILED, "jamp": measured(1.0, 2_000_000)},
    },
}


def test_means_by_library():
    assert by_library(STORED).splitlines()[2:] == [
        "| linen | 1 | 0 | 1 | 0.25 | 0.50 | 0.50 | 0.50 | 1.25 | 1.56 |",
        "| equinox | 1 | 0 | 1 | 0.50 |  |  |  |  |  |",
        "| all | 2 | 0 | 2 | 0.38 | 0.50 | 0.50 | 0.50 | 1.25 | 1.56 |",
    ]


def test_a_row_for_each_model_with_blanks_for_what_there_is_not():
    assert by_model(STORED).splitlines()[-2:] == [
        "| linen/lm | 100.0 | 50.0 |  | 100.0 | 8.00 | 4.00 |  | 2.00 | 16.00 | 8.00 | 4.00 | 2.00 | 1.00 | 1.00 | "
        "1.25 | 1.56 | 1.25 | 2.50 | 9 | 9 | 4 |",
        "| equinox/mlp |  | 0.0 |  | 100.0 | 4.00 |  |  | 2.00 | 8.00 |  | 4.00 |  |  | 1.00 |  |  |  | 1.00 |  "
        "| 9 | 4 |",
    ]


def test_the_mean_of_step_times_with_the_device():
    assert "a gradient step takes 1.25 of native's processor time, on the mean." in by_model(STORED)
    assert "on the Chip 9 takes 1.25 of native's time" in by_model({**STORED, "device": "Chip 9"})
