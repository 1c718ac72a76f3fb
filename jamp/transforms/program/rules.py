"""The names of the rules that decide about a step, as reports show them, each with what it says."""

from __future__ import annotations

RULES = {
    "half": "runs in half: a product or a convolution, or what O3, a rule or `jamp.half_precision` puts there",
    "half, float32 out": "a product that only float32 operations read, so that its result is not rounded",
    "float8": "a product of operands in 8 bits, by `matmul=` of the policy or a rule",
    "full": "runs in float32, by its class, a rule or `jamp.full_precision`",
    "promote": "runs in one dtype, which its operands choose",
    "follow": "moves or selects data; the dtype that comes in goes out",
    "attention": "an attention that was found, run as one primitive, by `attention=fused` of the policy",
    "softmax": "a softmax, computed in float32 and given back in half",
    "phase": "a product of positions that `sin`, `floor` or an index reads, in float32",
    "count": "a product of integers (one-hot rows, triangles of ones, ids), in float32",
    "short": "a product over the dimensions of space (a rotation, a cell, a camera), in float32",
    "frame": "a product of two matrices that are identities with something added (strains, series), in float32",
    "stencil": "a convolution of one channel with a kernel that the program writes, or into one, in float32",
    "cancelling": (
        "a product beside squares of what it multiplies (distances, moments), or of a system of equations, in float32"
    ),
    "mean": "a weighted mean: with a vector that is divided by its own sum, or of points in space, in float32",
    "divisor": "a product with a vector that is divided by, as of a kernel in a Sinkhorn iteration, in float32",
    "kernel": (
        "a product with exponentials (kernels, decays) whose size something else takes off, or with a power spectrum, "
        "in float32: float16 has no range for it"
    ),
    "written": "a product with numbers that the program writes (bins, a grid, powers, one-hot rows), in float32",
    "difference": "a product with a matrix that the program writes, and that subtracts (a Laplacian), in float32",
    "solution": "a product with what solves an equation (residuals cancel), or in an iteration that does, in float32",
    "scaled": "a product of data that numbers beyond the half range scale, in float32",
    "literals": "computed from literals alone",
    "highest": "runs in float32 with `precision=HIGHEST`, by a rule",
    "explicit": "a conversion that the program writes",
    "explicit precision": (
        "a product with a `precision=` that asks for float32, or operands that are neither float32 nor half"
    ),
    "no half kernel": "linear algebra, FFT and the like, which no library has in half",
    "decides when a loop ends": "as the program writes it, since the condition of a loop depends on it",
    "iterates to convergence": (
        "a loop that ends when floating values say so, with products that are as the program writes them for that; "
        "`half_precision`, or a rule for its scope, puts it in half"
    ),
    "decided in half": (
        "a loop that ends when floating values say so, and these are half by O3, a rule or a mark: it may end late or "
        "never; `full_precision` around it, or a rule for its scope, computes it in float32"
    ),
    "OD": "left at the dtypes of the program by the level OD",
    "as traced": (
        "left at the dtypes of the program: all of it at O0, which is given float32, or outside of any `cast_fn`, else "
        "work on bits, keys and counters"
    ),
    "opaque": "not known to jamp, and left at the dtypes of the program",
    "not floating": "touches no floats",
    "recurse": "a call, loop or branch, whose operands are cast at its border",
    "result": "the cast of a result of the whole function, or of a `cast_fn` inside",
    "cast_fn": "what a `cast_fn` inside adds (casts above all), and the derivatives of functions that bring their own",
}
