# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Reading the report
#
# `jamp.report` shows what a function runs in which precision. Nothing runs, so shapes are enough: the model below could be too large
# for this machine.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp

import jamp


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.SelfAttention(num_heads=4)(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(512)(nn.LayerNorm()(x)))
        return x + nn.Dense(128)(h)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(1000, 128)(tokens)
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(1000)(nn.LayerNorm()(x))


tokens = jax.ShapeDtypeStruct((8, 64), jnp.int32)
params = jax.eval_shape(Model().init, jax.random.key(0), tokens)


def loss_fn(params, tokens):
    logits = Model().apply(params, tokens)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
    return -picked.mean()


report = jamp.report(loss_fn, params, tokens, policy="O2:bfloat16")

# %% [markdown]
# ## The totals
#
# All products are in half, forward and backward:

# %%
print(f"{report.forward.share:.1%} forward, {report.gradient.share:.1%} with the backward pass")

# %% [markdown]
# What waits in memory for the backward pass, by dtype, beside float32:

# %%
full = jamp.report(loss_fn, params, tokens, policy="O0")
for name, r in (("O0", full), ("O2:bfloat16", report)):
    print(f"{name:12s}", {dtype: f"{size / 2**20:.1f} MB" for dtype, size in r.residual_bytes.items()})

# %% [markdown]
# The largest of these values, and where they come from:

# %%
for kept in report.residuals[:6]:
    print(f"{kept.bytes / 2**10:7.0f} kB  {kept.dtype:9s} {kept.shape!s:20s} {kept.where}")

# %% [markdown]
# ## The operations
#
# What runs in float32, and by which rule? `follow` and `promote` mean that the operands decided.

# %%
for op in report.operations:
    if op.outputs == ("float32",) and op.bytes > 2**16:
        print(f"{op.count:2d} x {op.primitive:20s} {op.rule:18s} {op.scope}")

# %% [markdown]
# ## A layer that you want elsewhere
#
# A rule for a scope changes it. Here the first block's attention goes to float32; the share falls, and the report tells by
# how much.

# %%
policy = jamp.get_policy("O2:bfloat16").with_rules(full=["*Block_0/SelfAttention_0*"])
steered = jamp.report(loss_fn, params, tokens, policy=policy)
print(f"{steered.forward.share:.1%} of the products in half; rules that match nothing: {steered.unmatched}")
assert 0.5 < steered.forward.share < 1

# %% [markdown]
# ## The whole table
#
# `print(report)` has all of it. [Inspection](../inspect.md) explains each line.

# %%
print(report)
