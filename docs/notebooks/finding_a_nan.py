# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Finding a NaN
#
# A loss is NaN after some steps in float16, and was fine in float32. This notebook finds the operation that made it.

# %%
import jax
import jax.numpy as jnp
import optax

import jamp

# %% [markdown]
# The model casts to float16 by hand in one place, as code that was tuned for speed often does. Can you see it?


# %%
def energy(h):
    with jax.named_scope("energy"):
        return (h * h).astype(jnp.float16)


def model(params, x):
    with jax.named_scope("encoder"):
        h = jnp.tanh(x @ params["in"]) @ params["mid"]
    with jax.named_scope("head"):
        e = energy(h)
        return (h * jnp.log1p(e)) @ params["out"]


keys = jax.random.split(jax.random.key(0), 4)
params = {
    "in": jax.random.normal(keys[0], (8, 32)),
    "mid": jax.random.normal(keys[1], (32, 32)) * 40,
    "out": jax.random.normal(keys[2], (32, 4)) / 10_000,
}
x = jax.random.normal(keys[3], (16, 8))
y = jnp.arange(16) % 4

policy = "O2:float16"
forward = jamp.cast_fn(model, policy)
tx = jamp.mixed_precision(optax.adam(1e-2), policy)


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()


# %% [markdown]
# ## 1. Steps are skipped
#
# The metrics say so: every step is skipped, and the scale only falls. That is not the scale's fault, since no scale helps.

# %%
state = tx.init(params)
step = jax.jit(lambda p, s, x, y: tx.update(jamp.scaled_value_and_grad(loss_fn, s)(p, x, y)[1], s, p))
for _ in range(5):
    _, state = step(params, state, x, y)
    print({name: value.item() for name, value in jamp.metrics(state).items()})

# %% [markdown]
# ## 2. Which gradient?
#
# `abort_after=` names the first gradient that is not finite. It is where the NaN arrives, and not where it comes from.

# %%
told = []
watched = jamp.mixed_precision(optax.adam(1e-2), policy, abort_after=2, on_abort=told.append)
state = watched.init(params)
step = jax.jit(lambda p, s, x, y: watched.update(jamp.scaled_value_and_grad(loss_fn, s)(p, x, y)[1], s, p))
for _ in range(2):
    _, state = step(params, state, x, y)
jax.effects_barrier()
print(told[0])

# %% [markdown]
# ## 3. Which operation?
#
# `jamp.first_nonfinite` runs the gradient function operation by operation. It names the first that made an infinity that
# reaches the result, the scope that it is in, its line, and how large the values were that it was made of.

# %%
found = jamp.first_nonfinite(jamp.scaled_value_and_grad(loss_fn, tx.init(params)), params, x, y)
print(found)
assert "energy" in found.scope

# %% [markdown]
# The cast in `energy` overflows: the squares are larger than 65,504, the largest number that float16 holds. jamp would have kept the
# square in float32, because a logarithm reads it. But a cast that the program writes is the program's word.
#
# ## 4. Mend it
#
# Take the cast away.


# %%
def energy(h):  # noqa: F811
    with jax.named_scope("energy"):
        return h * h


print(jamp.first_nonfinite(loss_fn, params, x, y))

# %% [markdown]
# The loss is finite. Activations are large in this model, so gradients still overflow at a scale of 2<sup>15</sup>. That the scale
# cures by itself: it comes down, and then steps are taken.

# %%
state = tx.init(params)
step = jax.jit(lambda p, s, x, y: tx.update(jamp.scaled_value_and_grad(loss_fn, s)(p, x, y)[1], s, p))
for _ in range(15):
    _, state = step(params, state, x, y)
print({name: value.item() for name, value in jamp.metrics(state).items()})
assert jamp.metrics(state)["grads_finite"]

# %% [markdown]
# Where nobody wrote a cast, and a level puts too much in half, a rule for the scope helps from outside:
# `jamp.get_policy("O3:float16").with_rules(full=["*energy*"])`.
