"""What fails today, as data: programs that lose more precision than careful code, with the policies and the reason.

An entry is an expected failure, and strict: whoever mends it takes it out.
"""

from tests.numerics._program import POLICIES

O1 = tuple(policy for policy in POLICIES if policy.startswith("O1"))
O2 = tuple(policy for policy in POLICIES if policy.startswith("O2"))

_BECAUSE: dict[str, dict[str, tuple[str, ...]]] = {
    "a loop to convergence computes in half what its condition depends on": {
        "implicit_graph": POLICIES,
        "spectral_norm": ("O1:bfloat16", "O1:float16", "O2:float16"),
        "conjugate_gradients": POLICIES,
        "value_iteration": POLICIES,
        "lasso": O2,
        "k_means": POLICIES,
        "newton_schulz": POLICIES,
        "bisection": O2,
        "adaptive_third_order": ("O1:bfloat16", "O2:bfloat16"),
    },
    "an operation that only a comparison reads votes for half": {
        "biweight_of_depths": O2,
        "huber_of_returns": O2,
        "quantile_critic": O2,
        "gated_outliers": O2,
        "loss_with_metrics": O2,
    },
    "keys of a sort are half, so that they tie": {
        "suppressed_boxes": O2,
        "hard_examples": O2,
    },
    "a carry that adds up by index, or that moves, is no accumulator": {
        "messages_in_a_scan": O2,
        "frames_in_a_scan": O2,
    },
    "a factor or a `stop_gradient` between the sums of a loop written out hides their chain": {
        "momentum_unrolled": O2,
        "euler_with_frozen_noise": O2,
        "refinement": O2,
        "n_body": O2,
    },
    "the transpose of a gather of half data adds up in half": {
        "hub_of_a_graph": O2,
        "words_of_one_kind": O2,
    },
    "literals beyond float16 make infinities": {
        "reaction": ("O2:float16",),
        "units_of_columns": ("O2:float16",),
    },
    "divisors are half: their epsilons vanish in float16, and their derivatives cancel": {
        "sparse_directions": ("O2:bfloat16",),
        "smoothed_signs": O2,
        "shares": O2,
        "cosine_attention": ("O2:float16",),
    },
    "the least float32 number is minus infinity in half": {
        "attention_with_padding": ("O1:bfloat16",),
        "flax_transformer": ("O1:bfloat16",),
    },
    "short products of coordinates, frames and cells are half": {
        "camera": POLICIES,
        "skinning": POLICIES,
        "kalman": POLICIES,
    },
    "convolutions with constant kernels are half": {
        "curvature_penalty": POLICIES,
        "sobel_edges": POLICIES,
    },
    "a product with one-hots of numbers that half does not hold is half": {
        "permuted_ids": POLICIES,
        "alignment": O1,
    },
    "a product with a constant operand that half does not hold is half": {
        "expected_bins": ("O2:bfloat16",),
        "returns_by_product": POLICIES,
    },
    "a branch that does not read a value erases what the others want of it": {
        "energy_in_a_branch": ("O2:float16",),
        "phase_in_a_branch": POLICIES,
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
    "periodic_cell": (1.3, "features of a few distances, each an exponential, are rounded"),
}
