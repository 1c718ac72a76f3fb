"""Runs JAX's own tests, plain and with every `jax.jit` around a cast that changes no number, and compares the two."""
