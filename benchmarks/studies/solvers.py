"""Steps of published solvers with a network in what they solve, until their own tolerance is met: cast and in float32.

    pip install diffrax optimistix lineax jaxopt
    python -m benchmarks.studies.solvers [--solvers diffrax,LM] [--store]

A solver that sees half noise takes more steps, or never ends; one that is right takes as many as in float32.
"""

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.files import OUT, RESULTS, write_json
from benchmarks.tables import print_table
from jamp import cast_fn

UNITS = 32
POLICIES = ("OD:bfloat16", "O1:bfloat16", "O2:bfloat16", "O2:float16")
Weights = tuple[jax.Array, jax.Array]
# Weights and a batch of data to what is found, and the number of steps that it took.
Solve = Callable[[Weights, jax.Array], tuple[jax.Array, jax.Array]]


def problem(seed: int) -> tuple[Weights, jax.Array]:
    """Random weights of a network of two layers, and eight rows of data."""
    first, second, data = jax.random.split(jax.random.key(seed), 3)
    weights = (jax.random.normal(key, (UNITS, UNITS)) / UNITS**0.5 for key in (first, second))
    return tuple(weights), jax.random.normal(data, (8, UNITS))


def network(weights: Weights, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights[0]) @ weights[1]


def contraction(weights: Weights, x: jax.Array, z: jax.Array) -> jax.Array:
    return 0.5 * jnp.tanh(0.5 * z @ weights[0] + x[0])


def distance(z: jax.Array, weights: Weights, x: jax.Array) -> jax.Array:
    """To minimise: what makes the network give what it gives of the first row."""
    return jnp.sum((network(weights, z) - network(weights, x[0])) ** 2) + 0.01 * jnp.sum(z**2)


def of_diffrax() -> Iterator[tuple[str, Solve]]:
    """Solvers of ordinary differential equations with adaptive steps; the implicit ones solve a stiff one."""
    import diffrax

    def solving(solver: Any, tolerance: float, decay: float = 1.0) -> Solve:
        def solve(weights: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            field = diffrax.ODETerm(lambda t, y, args: network(weights, y) - decay * y)
            control = diffrax.PIDController(rtol=tolerance, atol=tolerance)
            found = diffrax.diffeqsolve(
                field, solver, 0.0, 2.0, 0.1, x[0], stepsize_controller=control, max_steps=4096, throw=False
            )
            return found.ys, found.stats["num_steps"]

        return solve

    for name, tolerance in (("Heun", 1e-3), ("Bosh3", 1e-3), ("Tsit5", 1e-3), ("Dopri5", 1e-5), ("Dopri8", 1e-5)):
        yield f"diffrax/{name}", solving(getattr(diffrax, name)(), tolerance)
    for name, tolerance in (("Kvaerno3", 1e-3), ("Kvaerno5", 1e-5)):
        yield f"diffrax/{name}", solving(getattr(diffrax, name)(), tolerance, decay=10.0)


def of_optimistix() -> Iterator[tuple[str, Solve]]:
    """Fixed points, roots, least squares of weights, and minima."""
    import optimistix as optx

    def fixed_point(weights: Weights, x: jax.Array, solver: Any) -> Any:
        start = jnp.zeros(UNITS)
        return optx.fixed_point(lambda z, _: contraction(weights, x, z), solver, start, max_steps=256, throw=False)

    def root(weights: Weights, x: jax.Array, solver: Any) -> Any:
        start = jnp.zeros(UNITS)
        return optx.root_find(lambda z, _: z - contraction(weights, x, z), solver, start, max_steps=256, throw=False)

    def least_squares(weights: Weights, x: jax.Array, solver: Any) -> Any:
        first, second = weights
        wanted = network((0.9 * first, second), x)
        return optx.least_squares(
            lambda change, _: network((first + change, second), x) - wanted,
            solver, jnp.zeros_like(first), max_steps=256, throw=False,
        )  # fmt: skip

    def minimum(weights: Weights, x: jax.Array, solver: Any) -> Any:
        start = jnp.zeros(UNITS)
        return optx.minimise(lambda z, _: distance(z, weights, x), solver, start, max_steps=512, throw=False)

    def counted(find: Callable[..., Any], solver: Any) -> Solve:
        def solve(weights: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = find(weights, x, solver)
            return found.value, found.stats["num_steps"]

        return solve

    for find, tolerance, names in (
        (fixed_point, 1e-5, ("FixedPointIteration",)),
        (root, 1e-5, ("Newton", "Chord")),
        (least_squares, 1e-4, ("GaussNewton", "LevenbergMarquardt", "Dogleg")),
        (minimum, 1e-4, ("BFGS", "NonlinearCG")),
    ):
        for name in names:
            yield f"optimistix/{name}", counted(find, getattr(optx, name)(tolerance, tolerance))


def of_lineax() -> Iterator[tuple[str, Solve]]:
    """Iterative solvers of systems of linear equations, whose matrix is a product of weights."""
    import lineax

    def solving(solver: Any) -> Solve:
        def solve(weights: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            matrix = weights[0] @ weights[0].T + 0.3 * jnp.eye(UNITS)
            operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
            found = lineax.linear_solve(operator, x[0], solver, throw=False)
            return found.value, found.stats["num_steps"]

        return solve

    for name in ("CG", "GMRES", "BiCGStab"):
        yield f"lineax/{name}", solving(getattr(lineax, name)(1e-5, 1e-5))


def of_jaxopt() -> Iterator[tuple[str, Solve]]:
    """Fixed points and minima."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jaxopt says that it is no longer maintained.
        import jaxopt

    def counted(solver: Any, reads_data: bool) -> Solve:
        def solve(weights: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = solver.run(jnp.zeros(UNITS), weights, *((x,) if reads_data else ()))
            return found.params, found.state.iter_num

        return solve

    def of_data(make: Callable[..., Any], **settings: Any) -> Solve:
        def solve(weights: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            solver = make(lambda z, weights: contraction(weights, x, z), maxiter=256, tol=1e-5, **settings)
            return counted(solver, reads_data=False)(weights, x)

        return solve

    yield "jaxopt/FixedPointIteration", of_data(jaxopt.FixedPointIteration)
    yield "jaxopt/AndersonAcceleration", of_data(jaxopt.AndersonAcceleration, history_size=5)
    for name in ("GradientDescent", "BFGS", "LBFGS", "NonlinearCG"):
        solver = getattr(jaxopt, name)(distance, maxiter=512, tol=1e-3)
        yield f"jaxopt/{name}", counted(solver, reads_data=True)


def measured(solve: Solve, seeds: int) -> dict[str, Any]:
    """By policy: the steps of each problem, and how far the result is from float32's, relative to it."""
    ways = {"float32": solve, **{policy: cast_fn(solve, policy) for policy in POLICIES}}
    result: dict[str, Any] = {name: {"steps": [], "off": []} for name in ways}
    for name, way in ways.items():
        run = jax.jit(way)
        for seed in range(seeds):
            found, steps = run(*problem(seed))
            expected = np.asarray(jax.jit(solve)(*problem(seed))[0], np.float64)
            off = np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
            result[name]["steps"].append(int(steps))
            result[name]["off"].append(float(f"{off:.3g}"))
    return result


def main() -> None:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.solvers", description=__doc__)
    parser.add_argument("--solvers", default="", help="parts of names, divided by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--store", action="store_true", help="keep what was found in benchmarks/results")
    options = parser.parse_args()
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    families = (of_diffrax, of_optimistix, of_lineax, of_jaxopt)
    every = dict(pair for family in families for pair in family())
    chosen = {k: v for k, v in every.items() if any(part in k for part in options.solvers.split(","))}
    found: dict[str, Any] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name, solve in progress.track(chosen.items()):
            found[name] = measured(solve, options.seeds)
    write_json((RESULTS if options.store else OUT) / "solvers.json", {"jax": jax.__version__, "solvers": found})
    headings = ["solver", *next(iter(found.values()))]
    rows = [[name, *(str(way["steps"]) for way in row.values())] for name, row in found.items()]
    print_table("Steps until a solver's own tolerance is met", headings, rows)


if __name__ == "__main__":
    main()
