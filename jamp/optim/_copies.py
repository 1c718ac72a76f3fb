"""Which parts of a state are copies of the parameters, and which begin as something that only their shapes say."""

from collections.abc import Callable, Sequence

import jax
import optax
from jax.tree_util import tree_leaves_with_path

from jamp._compat import Atom, Jaxpr, Literal, called_jaxpr, open_jaxpr
from jamp._primitives import Trait, has


def copied(init: Callable[[optax.Params], optax.OptState], params: optax.Params) -> frozenset[tuple]:
    """The paths of the leaves that an optimizer starts from the values of the parameters.

    Args:
        init: What makes the state of parameters. It is traced; of one that looks at the values, nothing is known.
        params: The parameters.
    """
    paths: list[tuple] = []

    def arrays(params: optax.Params) -> list[jax.Array]:
        found = [(path, leaf) for path, leaf in tree_leaves_with_path(init(params)) if isinstance(leaf, jax.Array)]
        paths[:] = [path for path, _ in found]
        return [leaf for _, leaf in found]

    try:
        program = open_jaxpr(jax.make_jaxpr(arrays)(params))
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return frozenset()
    reads = _depends(program, [True] * len(program.invars))
    return frozenset(path for path, on in zip(paths, reads, strict=True) if on)


def _depends(jaxpr: Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Which results of a jaxpr are computed from some of its inputs."""
    found: set[Atom] = {var for var, on in zip(jaxpr.invars, given, strict=True) if on}
    for eqn in jaxpr.eqns:
        reads = [atom in found for atom in eqn.invars if not isinstance(atom, Literal)]
        makes = [any(reads)] * len(eqn.outvars)
        if any(reads) and has(eqn, Trait.CALLS):
            inside = [not isinstance(atom, Literal) and atom in found for atom in eqn.invars]
            makes = _depends(open_jaxpr(called_jaxpr(eqn.params)), inside)
        found.update(var for var, on in zip(eqn.outvars, makes, strict=True) if on)
    return [not isinstance(atom, Literal) and atom in found for atom in jaxpr.outvars]
