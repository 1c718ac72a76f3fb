"""Products over the dimensions of space are float32: rotations, poses, cameras, homogeneous points. Layers are half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, run, trace

KEYS = jax.random.split(jax.random.key(0), 4)
POINTS = 10 * jax.random.normal(KEYS[0], (30, 3)) + jnp.array([0.0, 0.0, 100.0])
POSE = jnp.eye(4).at[:3].set(jax.random.normal(KEYS[1], (3, 4)))
CAMERA = jnp.array([[500.1, 0.0, 320.3, 0.0], [0.0, 500.2, 240.7, 0.0], [0.0, 0.0, 1.0, 0.0]])
ANGLE = jnp.float32(0.3)


def homogeneous(points):
    return jnp.concatenate([points, jnp.ones_like(points[:, :1])], -1)


@jax.jit
def rotation(angle):
    """In a plane; put together in a function of its own."""
    return jnp.array([[jnp.cos(angle), -jnp.sin(angle)], [jnp.sin(angle), jnp.cos(angle)]])


@jax.jit
def around_z(angle):
    return jnp.eye(4).at[:2, :2].set(rotation(angle))


def projected(pixels):
    return pixels[:, :2] / pixels[:, 2:]


IN_SPACE = {
    "rows": lambda points, pose, camera, angle: homogeneous(points) @ pose.T,
    "einsum": lambda points, pose, camera, angle: jnp.einsum("ij,nj->ni", pose, homogeneous(points)),
    "padded": lambda points, pose, camera, angle: jnp.pad(points, ((0, 0), (0, 1)), constant_values=1.0) @ pose.T,
    "one at a time": lambda points, pose, camera, angle: jax.vmap(lambda x: pose @ jnp.append(x, 1.0))(points),
    "columns": lambda points, pose, camera, angle: jnp.vstack([points.T, jnp.ones(len(points))]).T @ camera.T,
    "camera": lambda points, pose, camera, angle: projected(homogeneous(points) @ pose.T @ camera.T),
    "camera without homogeneous points": lambda points, pose, camera, angle: projected(points @ camera[:, :3].T),
    "plane": lambda points, pose, camera, angle: points[:, :2] @ rotation(angle).T,
    "built pose": lambda points, pose, camera, angle: (pose @ around_z(angle))[:3],
    "inverse pose": lambda points, pose, camera, angle: (jnp.linalg.inv(pose) @ pose)[:3],
    "scanned": lambda points, pose, camera, angle: lax.map(lambda x: homogeneous(x[None])[0] @ pose.T, points),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("program", IN_SPACE.values(), ids=IN_SPACE)
def test_products_in_space_are_exact(program, level, half):
    args = (POINTS, POSE, CAMERA, ANGLE)
    np.testing.assert_array_equal(run(jamp.cast_fn(program, f"{level}:{half}"), *args), run(program, *args))


def layer(x, w, *_):
    return x @ w


def of_columns(x, w, *_):
    return jnp.stack([x[:, 0], x[:, 1]], -1) @ w


def of_parts(x, w, *_):
    return jnp.concatenate([x[:, :2], x[:, 2:]], -1) @ w


def of_a_stack(x, w, *_):
    """Weights that are put together, one for each layer."""
    return lax.scan(lambda x, w: (x @ w, None), x, jnp.stack([w, w]))[0]


LAYERS = {
    "four by four": (layer, (4, 4), (4, 4)),
    "four features": (layer, (128, 4), (4, 32)),
    "two coordinates": (of_columns, (128, 2), (2, 64)),
    "two parts": (of_parts, (128, 4), (4, 64)),
    "stacked weights": (of_a_stack, (8, 4), (4, 4)),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize(("program", "data", "weight"), LAYERS.values(), ids=LAYERS)
def test_layers_are_half(program, data, weight, level, half):
    cast = jamp.cast_fn(program, f"{level}:{half}")
    dtypes = product_dtypes(trace(cast, jnp.ones(data), jnp.ones(weight)))
    assert dtypes
    assert {dtype for operands in dtypes for dtype in operands} == {half}
