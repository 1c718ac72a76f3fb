"""A gradient penalty in half precision: second derivatives through scaled losses.

The loss of a classifier of digits has the squared norm of its gradient with respect to the images added to it (Drucker
and LeCun's double backpropagation, 1992), so that the training differentiates a gradient. In float16 both derivatives
need a scale: the inner one is scaled and unscaled where it is taken, and the outer one scales the whole sum.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import Parser, policy_or_all, positive_int, scaler_for
from sklearn.datasets import load_digits

import jamp

POLICIES = ("O0", "O1:float16", "O2:float16", "O1:bfloat16", "O2:bfloat16")
BATCH = 64
WEIGHT = 0.1


def init_mlp(key: jax.Array) -> list[dict[str, jax.Array]]:
    init = jax.nn.initializers.he_uniform()
    first, second = jax.random.split(key)
    return [{"w": init(first, (64, 256)), "b": jnp.zeros(256)}, {"w": init(second, (256, 10)), "b": jnp.zeros(10)}]


def mlp(params, images):
    # Smooth, because the second derivative of a ReLU is zero.
    hidden = jax.nn.gelu(images @ params[0]["w"] + params[0]["b"])
    return hidden @ params[1]["w"] + params[1]["b"]


def make_step(spec: str, tx: optax.GradientTransformation):
    apply_fn = jamp.cast_fn(mlp, policy=spec)

    def cross_entropy(images, params, labels):
        logits = apply_fn(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    def penalized_loss(params, images, labels, scale):
        """Returns the loss with its penalty, and the penalty, both as means over the batch."""
        loss, image_grads = jamp.value_and_grad(cross_entropy, scale)(images, params, labels)
        penalty = jnp.sum(image_grads**2) / len(images)
        return loss / len(images) + WEIGHT * penalty, penalty

    @jax.jit
    def train_step(params, opt_state, scale, images, labels):
        value_and_grad = jamp.value_and_grad(penalized_loss, scale, has_aux=True)
        (loss, penalty), grads = value_and_grad(params, images, labels, scale)
        finite = jamp.all_finite(grads)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = jamp.select_tree(finite, (new_params, new_opt_state), (params, opt_state))
        return params, opt_state, scale.adjust(finite), loss, penalty

    return train_step


def train(spec: str, steps: int) -> list[float]:
    """Returns the loss of every step."""
    data, labels = load_digits(return_X_y=True)
    data, labels = (data / 16).astype(np.float32), labels.astype(np.int32)
    tx = optax.adam(1e-3)
    params = init_mlp(jax.random.key(0))
    opt_state = tx.init(params)
    scale = scaler_for(jamp.get_policy(spec), jamp.DynamicLossScale(2.0**12, period=200))
    step = make_step(spec, tx)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(steps):
        chosen = rng.choice(len(data), BATCH, replace=False)
        params, opt_state, scale, loss, penalty = step(params, opt_state, scale, data[chosen], labels[chosen])
        losses.append(float(loss))
    mean = np.mean(losses[-100:])
    print(f"{spec:12s} loss {mean:.4f}  last penalty {penalty:.4f}  loss scale {float(scale.loss_scale):g}")
    return losses


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    parser = Parser(prog="gradient_penalty.py", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=policy_or_all, default="all")
    parser.add_argument("--steps", type=positive_int, default=1000)
    args = parser.parse_args(argv)
    specs = POLICIES if args.policy == "all" else (args.policy,)
    return {spec: train(spec, args.steps) for spec in specs}


if __name__ == "__main__":
    main()
