"""Train steps compiled for devices that are not at hand: `python -m benchmarks.compiled`."""
