"""What fails today, as data: programs that lose more precision than careful code, with the policies and the reason.

An entry is an expected failure, and strict: whoever mends it takes it out.
"""

from tests.numerics._program import POLICIES

O1 = tuple(policy for policy in POLICIES if policy.startswith("O1"))
O2 = tuple(policy for policy in POLICIES if policy.startswith("O2"))

_BECAUSE: dict[str, dict[str, tuple[str, ...]]] = {
    "a loop to convergence computes in half what its condition depends on": {
        "conjugate_gradients": POLICIES,
    },
    "keys of a sort are half, so that they tie": {
        "hard_examples": O2,
    },
    "a factor or a `stop_gradient` between the sums of a loop written out hides their chain": {
        "n_body": O2,
    },
    "literals beyond float16 make infinities": {
        "units_of_columns": ("O2:float16",),
    },
    "divisors are half: their epsilons vanish in float16, and their derivatives cancel": {
        "sparse_directions": ("O2:bfloat16",),
        "smoothed_signs": ("O2:bfloat16",),
        "shares": ("O2:bfloat16",),
        "cosine_attention": ("O2:float16",),
    },
    "short products of coordinates, frames and cells are half": {
        "camera": POLICIES,
        "skinning": POLICIES,
        "kalman": POLICIES,
    },
    "convolutions with constant kernels are half": {
        "curvature_penalty": O2,
        "sobel_edges": O2,
    },
    "a product with one-hots of numbers that half does not hold is half": {
        "permuted_ids": POLICIES,
        "alignment": O1,
    },
    "a product with a constant operand that half does not hold is half": {
        "expected_bins": ("O2:bfloat16",),
        "returns_by_product": POLICIES,
    },
    "numbers that a literal moves far from zero are stored in half": {
        "welford": O2,
    },
    "the derivative of a softmax reads its result in half": {
        "gumbel_routes": O2,
    },
}

# By program and policy, the reason.
FAILING = {
    (name, policy): reason
    for reason, programs in _BECAUSE.items()
    for name, policies in programs.items()
    for policy in policies
}

# Programs whose error is inherent to half: times what others may be off, and the reason.
INHERENT: dict[str, tuple[float, str]] = {
    "categorical_critic": (1.3, "a product of probabilities with weights is half, as any product of two results"),
    "degrees": (1.3, "a root of a degree divides half data twice in each layer"),
    "gradient_penalty": (1.3, "elementwise steps of a second derivative are rounded, of which careful code fuses some"),
    "invertible_mixing": (1.3, "results of products are rounded between the float32 sums around them"),
    "multistep_sampler": (1.3, "a chain of sums with a factor in each step; no entry once such chains are float32"),
    "n_body": (1.3, "forces are a product of five masses with differences"),
    "periodic_cell": (1.3, "features of a few distances, each an exponential, are rounded"),
}
