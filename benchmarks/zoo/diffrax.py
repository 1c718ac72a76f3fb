"""Neural differential equations: adaptive solver, while loops and custom derivatives around a small network."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.models import Model, normal
from benchmarks.zoo._entries import Zoo

ZOO = Zoo("diffrax")


class Field(eqx.Module):
    """Vector field given by a perceptron."""

    mlp: eqx.nn.MLP

    def __call__(self, t: jax.Array, y: jax.Array, args: Any) -> jax.Array:
        del t, args
        return self.mlp(y)


def _model(controller: Any, steps: int) -> Model:
    field = Field(eqx.nn.MLP(8, 8, 64, 2, jax.nn.softplus, key=jax.random.key(0)))
    params, static = eqx.partition(field, eqx.is_inexact_array)
    times = jnp.linspace(0.0, 1.0, 5)

    def solve(field: Any, start: jax.Array) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=0.1,
            y0=start,
            saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=controller,
            max_steps=steps,
        ).ys

    def apply(params: Any, start: jax.Array) -> Any:
        return jax.vmap(lambda y: solve(eqx.combine(params, static), y))(start)

    return Model(apply, params, (normal(16, 8),))


@ZOO.add(native=False)
def neural_ode(dtype: Any) -> Model:
    """Adaptive steps with recursive checkpointing."""
    del dtype
    return _model(diffrax.PIDController(rtol=1e-2, atol=1e-2), 64)


@ZOO.add(native=False)
def neural_ode_fixed(dtype: Any) -> Model:
    """Constant steps."""
    del dtype
    return _model(diffrax.ConstantStepSize(), 16)
