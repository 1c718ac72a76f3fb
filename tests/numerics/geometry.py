"""Coordinates: atoms, cells, rotations, cameras, meshes, rays. What counts is the absolute error of a few numbers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, dense, mlp, mlp_weights
from tests.numerics._program import Program

POINTS, WIDTH = 32, 16


def _pairs(positions):
    i, j = np.triu_indices(positions.shape[0], 1)
    return positions[i] - positions[j]


def periodic_cell(params, positions, cell, energies, *, dtype=F32):
    """Atoms in a triclinic cell by minimum images: fractions by one matrix, back by another."""

    def energy(positions):
        fractions = _pairs(positions @ jnp.linalg.inv(cell))
        separation = (fractions - jnp.round(fractions)) @ cell
        r = jnp.sqrt(jnp.sum(separation**2, -1) + 1e-6)
        features = jnp.exp(-8.0 * (r[:, None] - jnp.linspace(0.5, 6.0, WIDTH)) ** 2)
        return jnp.sum(mlp(params, features, dtype))

    return (jax.vmap(energy)(positions) - energies) ** 2


def equivariant(params, positions, vectors, *, dtype=F32):
    """An equivariant network: coordinates move along differences, weighed by messages."""
    x, h = positions, jnp.ones(positions.shape[:2] + (WIDTH,))
    for layer in range(3):
        difference = x[:, :, None] - x[:, None]
        square = jnp.sum(difference**2, -1, keepdims=True)
        pair = jnp.concatenate([h[:, :, None] + h[:, None], square], -1)
        message = jax.nn.silu(dense(params[layer], pair, dtype))
        weight = dense(params[3 + layer], message, dtype).astype(F32)
        x = x + jnp.mean(difference / (jnp.sqrt(square + 1e-8) + 1.0) * weight, 2)
        h = h + jnp.mean(message, 2).astype(F32)
    return jnp.sum((x - positions - vectors) ** 2, (1, 2))


def camera(params, points, pixels, *, dtype=F32):
    """Bundle adjustment: rotations by quaternions, a camera matrix, pixels."""
    del dtype

    def project(quaternion, shift):
        w, x, y, z = quaternion / jnp.linalg.norm(quaternion)
        rotation = jnp.array([
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ])  # fmt: skip
        seen = points @ rotation.T + shift
        image = seen @ jnp.array([[800.0, 0.0, 320.0], [0.0, 800.0, 240.0], [0.0, 0.0, 1.0]]).T
        return image[:, :2] / image[:, 2:]

    return jnp.sum((jax.vmap(project)(params["quaternions"], params["shifts"]) - pixels) ** 2, (1, 2))


def skinning(params, vertices, target, *, dtype=F32):
    """A mesh posed by learned joint angles: chained 4x4 transforms, blended by skinning weights."""
    angles = mlp(params["pose"], jnp.eye(WIDTH)[:1], dtype)[0]

    def joint(angle):
        c, s = jnp.cos(angle), jnp.sin(angle)
        rows = [[c, -s, 0.0, 30.0], [s, c, 0.0, 0.0], [0.0, 0.0, 1.0, 5.0], [0.0, 0.0, 0.0, 1.0]]
        return jnp.stack([jnp.stack(list(map(jnp.asarray, row))) for row in rows])

    chain = lax.associative_scan(jnp.matmul, jax.vmap(joint)(angles))
    weights = jax.nn.softmax(params["skin"])
    posed = jnp.einsum("vj,jab,vb->va", weights, chain, jnp.pad(vertices, ((0, 0), (0, 1)), constant_values=1.0))
    return jnp.sum((posed[:, :3] - target) ** 2, -1)


def procrustes(params, x, points, target, *, dtype=F32):
    """Frames of residues, as in protein structure: points to local coordinates of each, a clamped error."""
    v = mlp(params, x, dtype)
    e1 = v[:, :3] / jnp.sqrt(jnp.sum(v[:, :3] ** 2, -1, keepdims=True) + 1e-8)
    e2 = v[:, 3:6] - jnp.sum(e1 * v[:, 3:6], -1, keepdims=True) * e1
    e2 = e2 / jnp.sqrt(jnp.sum(e2**2, -1, keepdims=True) + 1e-8)
    frames = jnp.stack([e1, e2, jnp.cross(e1, e2)], -1)
    local = jnp.einsum("fij,fpi->fpj", frames, points[None] - 10.0 * v[:, None, 6:])
    distance = jnp.sqrt(jnp.sum((local - target) ** 2, -1) + 1e-4)
    return jnp.mean(jnp.minimum(distance, 40.0), -1)


def radiance(params, origins, directions, colors, *, dtype=F32):
    """A radiance field: positional encodings of points on rays, transmittance by a cumulative product."""
    t = jnp.linspace(1.0, 4.0, 24)
    points = origins[:, None] + directions[:, None] * t[:, None]
    encoded = (points[..., None] * 2.0 ** jnp.arange(8)).reshape(*points.shape[:2], -1)
    out = mlp(params, jnp.concatenate([jnp.sin(encoded), jnp.cos(encoded)], -1), dtype)
    alpha = 1.0 - jnp.exp(-jax.nn.softplus(out[..., 3]) * (t[1] - t[0]))
    transmitted = jnp.cumprod(1.0 - alpha + 1e-10, -1) / (1.0 - alpha + 1e-10)
    rendered = jnp.sum((alpha * transmitted)[..., None] * jax.nn.sigmoid(out[..., :3]), 1)
    return jnp.sum((rendered - colors) ** 2, -1)


def n_body(params, positions, target, *, dtype=F32):
    """Planets whose masses are learned, by leapfrog written out; softened gravity."""
    masses = jnp.exp(0.1 * mlp(params, jnp.eye(WIDTH)[: positions.shape[1]], dtype)[:, 0])

    def acceleration(x):
        d = x[:, None] - x[:, :, None]
        return jnp.einsum("bijc,j->bic", d * (jnp.sum(d**2, -1, keepdims=True) + 1e-4) ** -1.5, masses)

    x, v = positions, jnp.zeros_like(positions)
    for _ in range(6):
        v = v + 0.005 * acceleration(x)
        x = x + 0.01 * v
        v = v + 0.005 * acceleration(x)
    return jnp.sum((x - target) ** 2, (1, 2))


def _net(out=1, width=WIDTH):
    return lambda rng: mlp_weights(rng, width, 32, out)


def _atoms(rng, batch=8, atoms=6):
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3)[:atoms]
    return 1.3 * grid + 0.1 * rng.normal(size=(batch, atoms, 3))


def _cell(rng):
    cell = 12.0 * np.eye(3) + rng.normal(size=(3, 3))
    return _net()(rng), _atoms(rng) + 40.0, cell, rng.normal(size=8)


def _equivariant(rng):
    params = [mlp_weights(rng, WIDTH + 1, WIDTH)[0] for _ in range(3)] + [
        mlp_weights(rng, WIDTH, 1)[0] for _ in range(3)
    ]
    return params, 5.0 * _atoms(rng), 0.1 * rng.normal(size=(8, 6, 3))


def _cameras(rng):
    points = np.array([0.0, 0.0, 8.0]) + rng.normal(size=(POINTS, 3))
    params = {"quaternions": np.eye(4)[0] + 0.05 * rng.normal(size=(6, 4)), "shifts": 0.1 * rng.normal(size=(6, 3))}
    image = points @ np.array([[800.0, 0.0, 320.0], [0.0, 800.0, 240.0], [0.0, 0.0, 1.0]]).T
    return params, points, image[:, :2] / image[:, 2:] + rng.normal(size=(6, POINTS, 2))


def _mesh(rng):
    params = {"pose": _net(5)(rng), "skin": rng.normal(size=(POINTS, 5))}
    return params, 20.0 * rng.normal(size=(POINTS, 3)), 50.0 + 20.0 * rng.normal(size=(POINTS, 3))


def _residues(rng):
    points = 10.0 * rng.normal(size=(POINTS, 3))
    return _net(9)(rng), rng.normal(size=(POINTS, WIDTH)), points, 15.0 * rng.normal(size=(POINTS, POINTS, 3))


def _rays(rng):
    directions = rng.normal(size=(POINTS, 3))
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    return mlp_weights(rng, 48, 32, 4), rng.normal(size=(POINTS, 3)), directions, rng.random((POINTS, 3))


def _planets(rng):
    x = 4.0 * rng.normal(size=(8, 5, 3))
    return _net()(rng), x, x + 0.1 * rng.normal(size=x.shape)


ABSOLUTE = "coordinates"


def gyration(params, positions, *, dtype=F32):
    """A network moves atoms that are far from the origin; what counts is the spread around their mean."""
    moved = positions + 0.1 * mlp(params, positions - 20.0, dtype)
    centred = moved - moved.mean(1, keepdims=True)
    return jnp.linalg.norm(jnp.einsum("bni,bnj->bij", centred, centred) / POINTS, axis=(1, 2))


def centred_encoder(params, positions, *, dtype=F32):
    """The same, read by another network."""
    move, read = params
    moved = positions + 0.1 * mlp(move, positions - 20.0, dtype)
    return jnp.sum(mlp(read, moved - moved.mean(1, keepdims=True), dtype) ** 2, (1, 2))


def aligned_points(params, features, origins, *, dtype=F32):
    """Local points and frames of a network, each seen from the frames of the others."""
    out = mlp(params, features, dtype)
    turns = out[..., :4]
    w, x, y, z = jnp.moveaxis(turns / jnp.linalg.norm(turns, axis=-1, keepdims=True), -1, 0)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)),
        (2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)),
        (2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)),
    )
    frames = jnp.stack([jnp.stack(row, -1) for row in rows], -2)
    placed = jnp.einsum("bnij,bnj->bni", frames, out[..., 4:]) + origins
    seen = jnp.einsum("bmji,bmnj->bmni", frames, placed[:, None] - origins[:, :, None])
    return jnp.sqrt(jnp.sum(seen**2, -1) + 1e-6).mean((1, 2))


def _placed(rng):
    return mlp_weights(rng, 3, WIDTH, 3), rng.normal(size=(4, POINTS, 3)) + 20.0


def _encoded(rng):
    move, positions = _placed(rng)
    return (move, mlp_weights(rng, 3, WIDTH, 8)), positions


def _seen(rng):
    origins = 50.0 + 5.0 * rng.normal(size=(4, 10, 3))
    return mlp_weights(rng, 8, 32, 7), rng.normal(size=(4, 10, 8)), origins


PROGRAMS = (
    Program(gyration, _placed, (0,), ABSOLUTE),
    Program(centred_encoder, _encoded, (0,), ABSOLUTE),
    Program(aligned_points, _seen, (0, 1), ABSOLUTE),
    Program(periodic_cell, _cell, (0,), ABSOLUTE),
    Program(equivariant, _equivariant, (0,), ABSOLUTE, 2.0**-4),
    Program(camera, _cameras, (), ABSOLUTE, 2.0**-6),
    Program(skinning, _mesh, (), ABSOLUTE, 1.0),
    Program(procrustes, _residues, (0, 1), ABSOLUTE),
    Program(radiance, _rays, (0,), ABSOLUTE),
    Program(n_body, _planets, (0,), ABSOLUTE),
)
