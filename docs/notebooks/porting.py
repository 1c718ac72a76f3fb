# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Porting a recipe
#
# A float32 train step in Flax becomes a mixed one, and every step of the way is checked. The same order works for recipes from
# [other frameworks](../moving/index.md).

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jamp

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.LayerNorm()(nn.Dense(64)(x)))
        x = nn.relu(nn.LayerNorm()(nn.Dense(64)(x)))
        return nn.Dense(10)(x)


model = Network()
first_params = model.init(jax.random.key(0), images[:1])
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 150)))

# %% [markdown]
# ## Before: float32


# %%
def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(step, opt_state, steps=80):
    params, rng, losses = first_params, np.random.default_rng(0), []
    for _ in range(steps):
        batch = rng.choice(len(images), 32, replace=False)
        params, opt_state, loss = step(params, opt_state, images[batch], labels[batch])
        losses.append(float(loss))
    return params, opt_state, np.array(losses)


_, _, before = train(train_step, optimizer.init(first_params))

# %% [markdown]
# ## After: three lines
#
# The model is cast, the optimizer wrapped, with its clip and its schedule inside, and the gradient taken by jamp. The scale starts at
# 2<sup>10</sup>. From the default, 2<sup>15</sup>, it may come down in the first steps, which are skipped then, and the curves could not be
# laid on one another.

# %%
policy = jamp.get_policy("O2:float16")
apply_fn = jamp.cast_fn(model.apply, policy)
tx = jamp.mixed_precision(optimizer, policy, loss_scale=jamp.DynamicLossScale(2.0**10))


def mixed_loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply_fn(params, x), y).mean()


@jax.jit
def mixed_step(params, opt_state, x, y):
    loss, grads = jamp.scaled_value_and_grad(mixed_loss_fn, opt_state)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params, opt_state, after = train(mixed_step, tx.init(first_params))

# %% [markdown]
# ## Check 1: everything that should be half is

# %%
report = jamp.report(mixed_loss_fn, first_params, images[:32], labels[:32])
print(f"{report.gradient.share:.0%} of the FLOPs; {report.casts} casts; opaque: {report.opaque}")

# %% [markdown]
# ## Check 2: gradients are near those of float32

# %%
comparison = jamp.compare(jax.jit(jax.grad(loss_fn)), first_params, images[:32], labels[:32], policy=policy)
print(comparison)
assert max(leaf.relative for leaf in comparison.differences) < 0.05

# %% [markdown]
# ## Check 3: the losses lie on one another

# %%
figure, axis = plt.subplots(figsize=(8, 3.5))
axis.plot(before, color="0.8", linewidth=6, label="float32")
axis.plot(after, linewidth=1.2, label=str(policy))
axis.set(xlabel="step", ylabel="loss", yscale="log")
axis.legend()
print(f"largest difference of the losses: {np.abs(after - before).max():.4f}")
assert np.abs(after - before).max() < 0.1

# %% [markdown]
# ## Check 4: few steps are skipped

# %%
print({name: value.item() for name, value in jamp.metrics(opt_state).items()})

# %% [markdown]
# ## Check 5: a checkpoint goes back
#
# Parameters are float32 as before, so a file of them is what it always was. `jamp.to_optax` gives the state of the plain optimizer.

# %%
plain_params, plain_state = jamp.to_optax(params, opt_state)
x, y = jnp.asarray(images[:32]), jnp.asarray(labels[:32])
_, _, loss = train_step(plain_params, plain_state, x, y)
print(f"float32 goes on from here with a loss of {loss:.4f}")
