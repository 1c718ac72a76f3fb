"""The precisions that models are measured at."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.candidates import of_jamp, of_peers
from benchmarks.precision.candidates import candidates as of_precision
from benchmarks.steptime.candidates import candidates as of_steptime
from benchmarks.studies.residual_forms import forms
from jamp.inspect import matmuls


@pytest.mark.parametrize("found", [of_precision("O2:float16")[0], of_steptime()[0], forms()], ids=["p", "s", "f"])
def test_each_makes_a_function_of_another_precision(found):
    x = jnp.ones((4, 4))
    for candidate in found:
        out = candidate.wrap(lambda w, x: jnp.tanh(x @ w))(x, x)
        assert out.dtype == jnp.float32, candidate.name
    assert len({candidate.name for candidate in found}) == len(found)
    assert found[0].name == "float32"


def test_products_are_in_the_half_dtype():
    peers, missing = of_peers(jnp.float16)
    assert missing.keys() <= {"mpx"}  # Which the tests do without.
    for candidate in (*peers, of_jamp("O2:float16")):
        (product,) = matmuls(jax.make_jaxpr(candidate.wrap(jnp.matmul))(jnp.ones((4, 4)), jnp.ones((4, 4))))
        assert product.half, candidate.name
