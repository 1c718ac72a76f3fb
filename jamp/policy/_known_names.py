"""The bare names that a rule may use, so that a misspelt one is an error and not a rule that never matches."""

import functools
import importlib

# Every primitive that `import jax` registers, from jax 0.10 to 0.12, and the fused ones that come with later imports.
# Written down, because a primitive exists only once its module is imported, and a policy must mean the same on every
# version. tests/policy/test_known_names.py fails when the installed jax has one that is missing here.
PRIMITIVES = frozenset(
    """
    abs accum_grad_in_ref acos acosh add add_any addupdate after_all all_gather
    all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start
    all_gather_start all_to_all all_to_all_done all_to_all_start and approx_top_k
    argmax argmin asin asinh atan atan2 atanh axis_index bessel_i0e bessel_i1e
    bitcast_convert_type box_get box_set broadcast_in_dim broadcast_to call
    call_exported call_hi_primitive call_hi_primitive_linearized cbrt ceil check
    cholesky cholesky_update clamp closed_call clz complex composite concatenate
    cond conj conv_general_dilated convert_element_type copy core_map cos cosh
    create_linear create_token cudnn_fusion cumlogsumexp cummax cummin cumprod
    cumsum custom_jvp_call custom_jvp_call_jaxpr custom_lin custom_linear_solve
    custom_partitioning custom_vjp_call custom_vmap_call dce_sink debug_callback
    debug_print device_put digamma dim_as_value dimension_size div dot_general
    dot_product_attention_bwd dot_product_attention_bwd_wrapper
    dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
    dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
    dot_product_attention_fwd dot_product_attention_fwd_wrapper dynamic_slice
    dynamic_update_slice eig eigh empty empty2 empty_ref eq eq_to erf erf_inv erfc
    eval_jaxpr exp exp2 expm1 ffi_call fft floor free_ref freeze from_edtype gather
    ge geqp3 geqrf get gt hessenberg householder_product igamma igamma_grad_a
    igammac imag inspect_sharding integer_pow io_callback iota iota_2x32_shape
    is_finite jit layout_constraint le le_to lgamma linear_call log log1p log2
    log_extend log_read logistic lt lt_to lu lu_pivots_to_permutation max min mul
    mulhi name ne neg new_box new_log new_ref nextafter not one_minus_square
    optimization_barrier or ormqr pad pallas_call pbroadcast pbroadcast_done
    pbroadcast_dynamic pbroadcast_start philox2x32 philox4x32 pin platform_index
    pmax pmin polygamma polynomial population_count pow ppermute ppermute_done
    ppermute_start precv preduced psend psum psum_done psum_invariant
    psum_invariant_start psum_start pure_callback pvary qr ragged_all_to_all
    ragged_dot_general random_bits random_clone random_fold_in random_gamma
    random_seed random_split random_unwrap random_wrap real reduce reduce_and
    reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_scatter
    reduce_scatter_done reduce_scatter_start reduce_sum reduce_window
    reduce_window_max reduce_window_min reduce_window_sum reduce_xor
    reduced_vary_cast reduced_vary_cast_p regularized_incomplete_beta relayout rem
    remat2 remat_opt reshape reshard rev rng_bit_generator rng_uniform round rsqrt
    run_state scaled_dot scaled_matmul scaled_matmul_wrapper scan scatter
    scatter-add scatter-max scatter-min scatter-mul scatter-sub schur
    select_and_gather_add select_and_scatter select_and_scatter_add select_n
    shape_assertion shard_map sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh slice sort split sqrt square squeeze stack
    stage stop_gradient sub svd swap symmetric_product tan tanh threefry2x32
    threefry4x32 tie tile to_edtype top_k transpose triangular_solve tridiagonal
    tridiagonal_solve unpin unreachable unreduced_pmax unreduced_pmin unreduced_psum
    unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start
    unstack vary_unreduced_cast vary_unreduced_cast_p while
    with_memory_space_constraint xor zeros_like zeta
    """.split()
)

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
