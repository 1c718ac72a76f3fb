"""What fails today, as data: programs that lose more precision than careful code, with the policies and the reason.

An entry is an expected failure, and strict: whoever mends it takes it out.
"""

from tests.numerics._program import POLICIES

O1 = tuple(policy for policy in POLICIES if policy.startswith("O1"))
O2 = tuple(policy for policy in POLICIES if policy.startswith("O2"))

_BECAUSE: dict[str, dict[str, tuple[str, ...]]] = {
    "cotangents of zeros, divided by their norm and an epsilon of 1e-12, overflow float16 before a mask": {
        "cosine_attention": ("O2:float16",),
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
    "leapfrog_of_a_network": (1.3, "the first force adds half data to an argument, in half"),
    "invertible_mixing": (1.3, "results of products are rounded between the float32 sums around them"),
    "multistep_sampler": (1.3, "a chain of sums with a factor in each step; no entry once such chains are float32"),
    "n_body": (1.3, "forces are a product of five masses with differences"),
    "periodic_cell": (1.3, "features of a few distances, each an exponential, are rounded"),
}
