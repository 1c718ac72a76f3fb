"""A GAN on handwritten digits in float16: two optimizers, three losses, and a loss scale for each loss.

The discriminator's losses on real and on generated images and the generator's loss have gradients of different sizes,
so each adapts a scale of its own. An optimizer steps if all gradients it is given are finite. A scaler is a value, and
having three of them takes no more than three variables.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from _shared import Parser, png_path, policy, positive_int, scaler_for
from sklearn.datasets import load_digits

import jamp

matplotlib.use("Agg")  # A picture for a file needs no display.
import matplotlib.pyplot as plt

BATCH = 64
NOISE = 32

GENERATOR = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(256), nn.relu, nn.Dense(64), nn.sigmoid])
DISCRIMINATOR = nn.Sequential([nn.Dense(256), nn.leaky_relu, nn.Dense(256), nn.leaky_relu, nn.Dense(1)])
OPTIMIZER = optax.adam(3e-4, b1=0.5)


class Scales(NamedTuple):
    """One loss scale for each of the three losses."""

    real: Any
    fake: Any
    generator: Any


class State(NamedTuple):
    """All that changes in training."""

    generator: Any
    discriminator: Any
    generator_opt: Any
    discriminator_opt: Any
    scales: Scales


def init(key: jax.Array, spec: str) -> State:
    generator_key, discriminator_key = jax.random.split(key)
    generator = GENERATOR.init(generator_key, jnp.zeros((1, NOISE)))
    discriminator = DISCRIMINATOR.init(discriminator_key, jnp.zeros((1, 64)))
    scale = scaler_for(jamp.get_policy(spec), jamp.DynamicLossScale(2.0**16, period=200))
    opt_states = OPTIMIZER.init(generator), OPTIMIZER.init(discriminator)
    return State(generator, discriminator, *opt_states, Scales(scale, scale, scale))


def step_if(finite: jax.Array, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """Returns the params and the optimizer's state after a step, or as they were if a gradient was not finite."""
    updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
    stepped = optax.apply_updates(params, updates), new_opt_state
    return jamp.select_tree(finite, stepped, (params, opt_state))


def make_step(spec: str):
    generate = jamp.cast_fn(GENERATOR.apply, policy=spec)
    judge = jamp.cast_fn(DISCRIMINATOR.apply, policy=spec)

    def judged_as(target: float, discriminator, images):
        return optax.sigmoid_binary_cross_entropy(judge(discriminator, images), target).mean()

    def real_loss(discriminator, images):
        return judged_as(1.0, discriminator, images)

    def fake_loss(discriminator, images):
        return judged_as(0.0, discriminator, images)

    def generator_loss(generator, discriminator, noise):
        return judged_as(1.0, discriminator, generate(generator, noise))

    @jax.jit
    def train_step(state: State, images, noise):
        scales = state.scales
        fakes = generate(state.generator, noise)
        real, real_grads = jamp.value_and_grad(real_loss, scales.real)(state.discriminator, images)
        fake, fake_grads = jamp.value_and_grad(fake_loss, scales.fake)(state.discriminator, fakes)
        finite = Scales(jamp.all_finite(real_grads), jamp.all_finite(fake_grads), None)
        # The gradients are unscaled and may be added, though their scales differ.
        grads = jax.tree.map(jnp.add, real_grads, fake_grads)
        discriminator, discriminator_opt = step_if(
            finite.real & finite.fake, grads, state.discriminator_opt, state.discriminator
        )
        value_and_grad = jamp.value_and_grad(generator_loss, scales.generator)
        loss, grads = value_and_grad(state.generator, discriminator, noise)
        finite = finite._replace(generator=jamp.all_finite(grads))
        generator, generator_opt = step_if(finite.generator, grads, state.generator_opt, state.generator)
        scales = Scales(*(scale.adjust(ok) for scale, ok in zip(scales, finite, strict=True)))
        return State(generator, discriminator, generator_opt, discriminator_opt, scales), (real, fake, loss)

    return train_step


def plot(images: np.ndarray, generated: np.ndarray, path) -> None:
    """Draws a row of real images over a row of generated ones."""
    figure, axes = plt.subplots(2, len(images), figsize=(len(images), 2.4))
    for row, name, group in zip(axes, ("real", "generated"), (images, generated), strict=True):
        for axis, image in zip(row, group, strict=True):
            axis.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            axis.axis("off")
        row[0].set_title(name, loc="left")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: list[str] | None = None) -> State:
    parser = Parser(prog="gan.py", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=policy, default="O2:float16")
    parser.add_argument("--steps", type=positive_int, default=3000)
    parser.add_argument("--out", type=png_path, default="out/gan.png")
    args = parser.parse_args(argv)
    images = (load_digits().data / 16).astype(np.float32)
    state = init(jax.random.key(0), args.policy)
    step = make_step(args.policy)
    rng = np.random.default_rng(0)
    for i in range(args.steps):
        batch = images[rng.choice(len(images), BATCH, replace=False)]
        noise = rng.standard_normal((BATCH, NOISE), np.float32)
        state, losses = step(state, batch, noise)
        if i % 300 == 0 or i == args.steps - 1:
            losses = " ".join(f"{name} {loss:.3f}" for name, loss in zip(Scales._fields, losses, strict=True))
            scales = " ".join(f"{float(scale.loss_scale):g}" for scale in state.scales)
            print(f"step {i:4d}  losses: {losses}  scales: {scales}")
    plot(batch[:10], np.asarray(GENERATOR.apply(state.generator, noise[:10])), args.out)
    return state


if __name__ == "__main__":
    main()
