"""Makes training go wrong on a random schedule: losses, gradients, single leaves, devices and microbatches.

faults = random_faults(key, steps=2000, kinds=("loss", "leaf"))
...                             # In the train step, with the fault of this step:
x = fault.in_microbatch(x)
loss = fault.in_loss(loss)
grads = fault.in_leaf(fault.in_gradients(grads))
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

KINDS = ("none", "loss", "gradients", "leaf", "device", "microbatch")


class Fault(NamedTuple):
    """What goes wrong: arrays of shape () for one step, or of shape (steps,) for a schedule.

    Attributes:
        kind: Index in `KINDS`. int32.
        value: NaN, inf or -inf. float32.
        where: Which leaf, device or microbatch; taken modulo their number. int32.
    """

    kind: jax.Array
    value: jax.Array
    where: jax.Array

    def _hits(self, kind: str) -> jax.Array:
        return self.kind == KINDS.index(kind)

    def in_loss(self, loss):
        return loss * jnp.where(self._hits("loss"), self.value, 1).astype(loss.dtype)

    def in_gradients(self, grads):
        return jax.tree.map(lambda g: jnp.where(self._hits("gradients"), self.value.astype(g.dtype), g), grads)

    def in_leaf(self, grads):
        """Spoils one element of one leaf."""
        leaves, treedef = jax.tree.flatten(grads)
        hits = [self._hits("leaf") & (self.where % len(leaves) == i) for i in range(len(leaves))]
        first = [jnp.where(hit, self.value.astype(g.dtype), g.ravel()[0]) for hit, g in zip(hits, leaves, strict=True)]
        spoiled = [g.ravel().at[0].set(x).reshape(g.shape) for g, x in zip(leaves, first, strict=True)]
        return jax.tree.unflatten(treedef, spoiled)

    def in_device(self, x, axis_name):
        """Spoils one example of the batch on one device of a mapped axis."""
        here = self._hits("device") & (self.where % lax.axis_size(axis_name) == lax.axis_index(axis_name))
        return x.at[0].multiply(jnp.where(here, self.value, 1))

    def in_microbatch(self, x, microbatches):
        """Spoils one example of the batch, as `jamp.accumulate_gradients` deals it out."""
        return x.at[self.where % microbatches].multiply(jnp.where(self._hits("microbatch"), self.value, 1))


def random_faults(key: jax.Array, steps: int, kinds: tuple[str, ...], rate: float = 0.2) -> Fault:
    """A schedule on which a share `rate` of the steps goes wrong, in one of several ways each."""
    keys = jax.random.split(key, 4)
    chosen = jax.random.choice(keys[0], jnp.array([KINDS.index(kind) for kind in kinds]), (steps,))
    kind = jnp.where(jax.random.bernoulli(keys[1], rate, (steps,)), chosen, 0)
    value = jax.random.choice(keys[2], jnp.array([jnp.nan, jnp.inf, -jnp.inf]), (steps,))
    return Fault(kind.astype(jnp.int32), value, jax.random.randint(keys[3], (steps,), 0, 2**30))
