# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A first training
#
# A classifier of handwritten digits, in float32, float16 and bfloat16, beside one another. The file is a
# [jupytext](https://jupytext.readthedocs.io) notebook: open it in Jupyter, or run it with Python.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jamp

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
train, test = slice(0, 1500), slice(1500, None)

# %% [markdown]
# The model is plain JAX. It is float32, and stays so.


# %%
def init(key):
    sizes = (64, 256, 256, 10)
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
        for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def model(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


# %% [markdown]
# One function trains at any policy. The scale starts high and doubles every 30 steps here, in place of 2,000, so that there is something to
# see.


# %%
def run(policy, steps=200):
    forward = jamp.cast_fn(model, policy)
    scale = jamp.DynamicLossScale(2.0**19, period=30)
    half = jamp.get_policy(policy).compute_dtype == jnp.float16
    tx = jamp.mixed_precision(optax.adam(1e-3), policy, loss_scale=scale if half else None)

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()

    @jax.jit
    def step(params, opt_state, x, y):
        loss, grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init(jax.random.key(0))
    opt_state = tx.init(params)
    rng = np.random.default_rng(0)
    losses, scales = [], []
    for _ in range(steps):
        batch = rng.choice(1500, 64, replace=False)
        params, opt_state, loss = step(params, opt_state, images[train][batch], labels[train][batch])
        losses.append(float(loss))
        scales.append(float(jamp.metrics(opt_state)["loss_scale"]))
    accuracy = float((forward(params, images[test]).argmax(-1) == labels[test]).mean())
    return losses, scales, accuracy, jamp.metrics(opt_state)


runs = {policy: run(policy) for policy in ("O0", "O2:bfloat16", "O2:float16")}

# %% [markdown]
# The test accuracies:

# %%
for policy, (losses, _, accuracy, metrics) in runs.items():
    skipped = int(metrics["skipped"])
    print(f"{policy:12s} accuracy {accuracy:.1%}  last loss {losses[-1]:.4f}  skipped {skipped}")

# %% [markdown]
# The curves lie on one another. Below is the loss scale of the float16 run: it doubles until a step overflows, and halves.

# %%
figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, height_ratios=(2, 1))
for policy, (losses, _, _, _) in runs.items():
    style = {"color": "0.8", "linewidth": 6} if policy == "O0" else {"linewidth": 1.2}
    upper.plot(losses, label=policy, **style)
upper.set(ylabel="training loss", yscale="log")
upper.legend()
lower.step(range(200), runs["O2:float16"][1], where="post")
lower.set_yscale("log", base=2)
lower.set(ylabel="loss scale", xlabel="step")
figure.tight_layout()

# %% [markdown]
# Every product of the model, forward and backward, took half operands:

# %%
report = jamp.report(model, init(jax.random.key(0)), images[:64], policy="O2:bfloat16")
print(f"{report.gradient.share:.0%} of {report.gradient.total / 1e6:.1f} MFLOP")
assert abs(runs["O0"][2] - runs["O2:float16"][2]) < 0.02
