"""MegEngine's mixed-precision tutorial: ResNet-18 under three forms of autocast and two forms of "transmission".

The forms are its context manager (here: a transform), its decorator and its global switch (here: a context that turns
precision off, because nothing global turns it on). The transmission is the way back through the network: automatic, or
by hand in three calls with a hook between them. Images come with their channels first, as MegEngine keeps them, and go
through `channels_last`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import resnet
from _shared import Parser, positive_int

import jamp

# MegEngine's network returns what it computes in. jamp's returns float32 unless it is told otherwise.
POLICY = jamp.get_policy("O1:float16").with_output_dtype(jnp.float16)


def channels_last(tree: Any) -> Any:
    """Moves channels last in images `(N, C, H, W)`, which is how tensor cores and cuDNN's fast kernels want them.

    Flax keeps images and kernels this way already, so that this is all there is to do, once, where the data comes in.
    In 16 bits, make batch and channels multiples of 8 as well.
    """
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, -1) if x.ndim == 4 else x, tree)


def autocast_forms(model: resnet.ResNet, variables: Any, image: jax.Array) -> dict[str, jnp.dtype]:
    """Returns the dtype of the output under each form."""
    net = partial(model.apply, train=False)
    transformed = jamp.cast_fn(net, policy=POLICY)

    @jamp.cast_fn(policy=POLICY)
    def decorated(variables, image):
        return net(variables, image)

    forms = {"transform": transformed, "decorator": decorated}
    dtypes = {name: jax.eval_shape(form, variables, image).dtype for name, form in forms.items()}
    with jamp.disable():
        dtypes["switched off"] = jax.eval_shape(transformed, variables, image).dtype
    return dtypes


def make_loss_fn(model: resnet.ResNet) -> Callable:
    forward = jamp.cast_fn(resnet.train_forward(model), policy="O1:float16")

    def loss_fn(params, stats, image, label):
        logits, stats = forward(params, stats, image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean(), stats

    return loss_fn


def automatic_step(loss_fn: Callable, tx: optax.GradientTransformation) -> tuple[Callable, Callable]:
    """`scaler.backward(gm, loss)`: scaling, unscaling, the check and the skip happen in the optimizer."""
    tx = jamp.loss_scaled(jamp.DynamicLossScale(2.0**4), inner=tx)

    @jax.jit
    def step(params, opt_state, stats, image, label):
        value_and_grad = jamp.scaled_value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, new_stats), grads = value_and_grad(params, stats, image, label)
        updates, opt_state = tx.update(grads, opt_state, params)
        stats = jamp.select_tree(opt_state.grads_finite, new_stats, stats)
        return optax.apply_updates(params, updates), opt_state, stats, loss

    return tx.init, step


def manual_step(loss_fn: Callable, tx: optax.GradientTransformation, hook: Callable) -> tuple[Callable, Callable]:
    """Backward, unscale and update in three calls. `hook` sees the scaled gradients, and may change them."""

    def init(params):
        return tx.init(params), jamp.DynamicLossScale(2.0**4)

    @jax.jit
    def step(params, opt_state, stats, image, label):
        inner, scale = opt_state

        def scaled_loss_fn(params):
            loss, new_stats = loss_fn(params, stats, image, label)
            return scale.scale(loss), (loss, new_stats)

        grads, (loss, new_stats) = jax.grad(scaled_loss_fn, has_aux=True)(params)
        grads = scale.unscale(hook(grads))
        finite = jamp.all_finite(grads)
        updates, new_inner = tx.update(grads, inner, params)
        new = optax.apply_updates(params, updates), new_inner, new_stats
        params, inner, stats = jamp.select_tree(finite, new, (params, inner, stats))
        return params, (inner, scale.adjust(finite)), stats, loss

    return init, step


def zero_small(grads: Any) -> Any:
    """A hook: drops what is under 1e-7 in the scaled gradients."""
    return jax.tree.map(lambda g: jnp.where(jnp.abs(g) < 1e-7, 0, g), grads)


def train(init: Callable, step: Callable, params: Any, stats: Any, batch: tuple, steps: int) -> list[float]:
    opt_state = init(params)
    losses = []
    for _ in range(steps):
        params, opt_state, stats, loss = step(params, opt_state, stats, *batch)
        losses.append(float(loss))
    return losses


def main(argv: list[str] | None = None) -> tuple[dict[str, jnp.dtype], dict[str, list[float]]]:
    parser = Parser(prog="megengine_resnet18.py", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive_int, default=5)
    parser.add_argument("--size", type=positive_int, default=224, help="height and width of the image")
    parser.add_argument("--width", type=positive_int, default=64, help="channels of the first convolution")
    args = parser.parse_args(argv)
    model = resnet.ResNet(depth=18, width=args.width)
    params, stats = resnet.init(model, 0, args.size)
    image = jax.random.normal(jax.random.key(1), (1, 3, args.size, args.size))
    image, label = channels_last((image, jnp.zeros(1, jnp.int32)))

    dtypes = autocast_forms(model, {"params": params, "batch_stats": stats}, image)
    for form, dtype in dtypes.items():
        print(f"{form}: output in {dtype}")

    loss_fn, sgd = make_loss_fn(model), optax.sgd(0.01)
    losses = {}
    for name, (init, step) in {
        "automatic": automatic_step(loss_fn, sgd),
        "manual": manual_step(loss_fn, sgd, zero_small),
    }.items():
        losses[name] = train(init, step, params, stats, (image, label), args.steps)
        print(f"{name} transmission: loss {losses[name][0]:.6f} -> {losses[name][-1]:.6f}")
    return dtypes, losses


if __name__ == "__main__":
    main()
