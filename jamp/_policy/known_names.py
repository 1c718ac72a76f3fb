"""The bare names that a rule may use, so that a misspelt one is an error and not a rule that never matches."""

import functools
import importlib

from jamp._primitives import TABLE


def primitives() -> frozenset[str]:
    """Names of the primitives that a rule may use without a prefix: those that have a row in jamp's table.

    They are written down there, because a primitive exists only once its module is imported, and a policy must mean the
    same on every version.
    """
    return frozenset(TABLE)


# Only jamp.optim imports optax, so the names of its losses are written down. The test above checks these too.
_OPTAX_LOSSES = frozenset(
    """
    binary_dice_loss convex_kl_divergence cosine_distance cosine_similarity ctc_loss
    ctc_loss_with_forward_probs dice_loss generalized_kl_divergence hinge_loss
    huber_loss kl_divergence kl_divergence_with_log_targets l2_loss log_cosh
    multiclass_generalized_dice_loss multiclass_hinge_loss
    multiclass_perceptron_loss multiclass_sparsemax_loss ntxent perceptron_loss
    poly_loss_cross_entropy ranking_softmax_loss safe_softmax_cross_entropy
    sigmoid_binary_cross_entropy sigmoid_focal_loss smooth_labels
    softmax_cross_entropy softmax_cross_entropy_with_integer_labels sparsemax_loss
    squared_error triplet_margin_loss
    """.split()
)

# What JAX inlines leaves no name in a jaxpr. These are one primitive each, for which a rule is taken. `pjit` is what
# `jit` was called before, and the others are second names of a function.
_OTHER_NAMES = {
    name: found
    for name, _, found in (
        entry.partition(":")
        for entry in """
    absolute:abs arccos:acos arcsin:asin arcsinh:asinh arctan:atan arctan2:atan2 arctanh:atanh fabs:abs maximum:max
    minimum:min multiply:mul negative:neg pjit:jit sigmoid:logistic subtract:sub true_divide:div
    hard_swish:hard_silu swish:silu
    """.split()
    )
}
# Rules by these names match nothing: the primitives that they make are those of other functions too.
INLINED = frozenset(
    """
    conjugate deg2rad dot float_power inner log10 matmul outer positive rad2deg ravel spacing swapaxes vdot
    """.split()
)

_JAX_MODULES = (
    "jax.lax",
    "jax.nn",
    "jax.numpy",
    "jax.numpy.fft",
    "jax.numpy.linalg",
    "jax.scipy.special",
    "jax.image",
)


@functools.cache
def function_names() -> frozenset[str]:
    """Names of the public functions of jax, and of optax's losses, that a rule may use without a prefix."""
    names = set(_OPTAX_LOSSES)
    for module in map(importlib.import_module, _JAX_MODULES):
        # `vars` and not `getattr`: the latter wakes the modules' deprecation warnings.
        names |= {n for n, v in vars(module).items() if callable(v) and not isinstance(v, type) and n[0] != "_"}
    return frozenset(names)


def in_jaxprs(name: str) -> str:
    """The name that a jaxpr has for a bare name."""
    return _OTHER_NAMES.get(name, name)
