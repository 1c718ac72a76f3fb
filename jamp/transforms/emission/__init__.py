"""Binds what a plan says: casts, primitives, and the rewrites that become something else."""
