"""The tests' own evaluator agrees with the compiler."""

import jax
import numpy as np
import pytest

from tests.transforms.behaviour.test_properties import M, V, W
from tests.transforms.harness import run
from tests.transforms.library_programs import LIBRARY_OPERATIONS
from tests.transforms.programs import OPERATIONS


@pytest.mark.nightly  # Half a minute.
def test_operations_evaluated_one_by_one_are_those_that_the_compiler_runs():
    def fn(m, v, w):
        return {name: operation(m, m[::-1], v, w) for name, operation in OPERATIONS.items()}

    compiled, evaluated = jax.jit(fn)(M, V, W), run(fn, M, V, W)
    for name in OPERATIONS:
        atol = 1e-4 if name in LIBRARY_OPERATIONS else 1e-6  # Of numbers around a thousand the last digits differ.
        np.testing.assert_allclose(evaluated[name], compiled[name], rtol=1e-5, atol=atol, err_msg=name)
