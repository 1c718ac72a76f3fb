"""A weighted mean is a sum: of a vector that is divided by its own sum, no digit is lost. Layers are half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, run, trace

rng = np.random.default_rng(0)
X = rng.integers(-1, 2, (16, 16)).astype(np.float32)
W = np.eye(16, dtype=np.float32)[rng.permutation(16)]
# Their sum is 16, and no half dtype holds a sixteenth of one of them.
SHARES = (1 + np.repeat([1, -1], 8) / 4096).astype(np.float32)


def centred(h, s):
    share = s / s.sum()
    return h - share @ h


MEANS = {
    "of rows": lambda h, s: s / s.sum() @ h,
    "of columns": lambda h, s: h @ (s / jnp.sum(s)),
    "by einsum": lambda h, s: jnp.einsum("n,nd->d", s / s.sum(), h),
    "of one row": lambda h, s: (s / s.sum())[None] @ h,
    "kept axis": lambda h, s: (s / s.sum(keepdims=True)).reshape(1, 16) @ h,
    "of each": lambda h, s: jax.vmap(lambda h: s / s.sum() @ h)(h.reshape(2, 8, 2, 8).swapaxes(1, 2).reshape(2, 16, 8)),
    "in a function": lambda h, s: jax.jit(lambda h: s / s.sum() @ h)(h),
    "in a checkpoint": lambda h, s: jax.checkpoint(centred)(h, s),
    "centred": centred,
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_a_weighted_mean_is_exact(mean, level, half):
    def program(x, w, s):  # Behind it a layer, which would have it in half.
        out = mean(x @ w, s)
        return out, jnp.tanh(out.reshape(-1, 1) @ x[:1])

    cast = jamp.cast_fn(program, f"{level}:{half}")
    np.testing.assert_array_equal(run(cast, X, W, SHARES)[0], run(program, X, W, SHARES)[0])


LAYERS = {
    "attention": lambda h, w, s: jax.nn.softmax(h @ w) @ h,
    "attention of one query": lambda h, w, s: jax.nn.softmax(s @ h) @ h + w,
    "softmax of one row": lambda h, w, s: jnp.exp(s[None]) / jnp.exp(s[None]).sum(1, keepdims=True) @ h + w,
    "a graph": lambda h, w, s: (w / w.sum(1, keepdims=True)) @ h,
    "one row": lambda h, w, s: s @ w + h,
    "a normalized row": lambda h, w, s: (s / jnp.linalg.norm(s)) @ w + h,
    "divided by another sum": lambda h, w, s: (s / w.sum(0)) @ w + h,
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers_are_half(layer, level, half):
    program = jamp.cast_fn(lambda x, w, s: layer(x @ w, w, s), f"{level}:{half}")
    products = [dtypes for dtypes in product_dtypes(trace(program, X, W, SHARES)) if dtypes]
    assert {str(dtype) for dtypes in products for dtype in dtypes} == {half}
