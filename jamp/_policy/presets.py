"""Op lists of other frameworks, in jax's names.

Each preset lists what its framework lists, and then puts among *promote* the primitives that jamp's own table runs in
float32 while the framework runs them in whatever dtype comes in. Three things hold for all of them:

* Sums, means, variances, norms and losses have no primitive of their own in jax. Where a list names one, the primitives
  that it is made of are listed (`reduce_sum`), or the function that makes it, so that all of it is ruled (`norm`).
* Layer, group and batch normalization are functions of the model libraries. Their parts are ruled: the reductions, the
  squares and the reciprocal square root run in float32.
* `reciprocal` is `integer_pow[y=-1]` in a jaxpr, and `log10` is a `log` and a multiplication.

Sources: PyTorch `aten/src/ATen/autocast_mode.h`, PaddlePaddle
`python/paddle/amp/amp_lists.py`, MindSpore `mindspore/python/mindspore/train/amp.py` (level "auto"), MXNet
`python/mxnet/amp/lists/symbol_fp16.py`, MegEngine `imperative/src/impl/transformations/dtype_promote.cpp`, Apex
`apex/amp/lists`.
"""


def _preset(half: str, full: str, promote: str) -> dict[str, tuple[str, ...]]:
    return {"half": tuple(half.split()), "full": tuple(full.split()), "promote": tuple(promote.split())}


# On every framework's list of functions to run in float32.
_FULL_EVERYWHERE = "acos asin cosh exp expm1 log log2 pow rsqrt sinh softplus tan"

# On the float32 lists of every framework but MegEngine, whose losses run in the dtype of the logits.
_LOSSES = """
    hinge_loss huber_loss kl_divergence l2_loss sigmoid_binary_cross_entropy softmax_cross_entropy
    softmax_cross_entropy_with_integer_labels squared_error
"""

PRESETS = {
    # lower_precision_fp: convolutions and every product of matrices. Not in jax: prelu, the RNN cells (their products
    # are ruled inside `scan`), scaled_dot_product_attention (a fused kernel with a float32 softmax inside, which a rule
    # over the unfused jax function would not have).
    # fp32: not in jax: dist, pdist, cdist, renorm, and losses that optax lacks. layer_norm, group_norm: by parts.
    # promote: not in jax: addcdiv, addcmul, bilinear, grid_sampler; `dot` is one-dimensional there and general here.
    "pytorch": _preset(
        half="dot_general conv_general_dilated",
        full=f"""
            {_FULL_EVERYWHERE} {_LOSSES} erf_inv integer_pow log1p square
            reduce_sum reduce_prod cumsum cumprod softmax log_softmax logsumexp
            norm vector_norm matrix_norm cosine_similarity triplet_margin_loss resize
        """,
        promote="""
            cbrt sqrt
            atan2 cross vdot tensordot scatter-add
            acosh asinh atan atanh cos digamma exp2 lgamma polygamma sin
        """,
    ),
    # White list: conv2d, matmul, einsum, mul, max_pool2d_with_index. Not in jax: the fused attention and feed-forward
    # layers. Convolutions of other ranks are not listed there; in jax they are the same primitive.
    # Black list: not in jax: tanh_shrink, softmin, dist, renorm, hsigmoid_loss. lookup_table is `take`, which embedding
    # layers call; the interpolations are `resize`.
    "paddle": _preset(
        half="dot_general conv_general_dilated reduce_window_max",
        full=f"""
            {_FULL_EVERYWHERE} {_LOSSES} atanh erf_inv integer_pow square
            reduce_sum reduce_prod cumsum cumprod softmax log_softmax
            norm cosine_similarity triplet_margin_loss resize take scatter scatter-add
        """,
        promote="cbrt sqrt acosh asinh atan atan2 cos digamma exp2 lgamma log1p polygamma sin",
    ),
    # White list of level "auto": the convolutions, MatMul, BatchMatMul, Einsum, Dense, Addmm. Not in jax: PReLU.
    # Black list: not in jax: the distances, Renorm, and the losses that optax lacks. Square is not listed.
    "mindspore": _preset(
        half="dot_general conv_general_dilated",
        full=f"""
            {_FULL_EVERYWHERE} {_LOSSES} erf_inv integer_pow log1p
            reduce_sum reduce_prod cumsum cumprod softmax log_softmax norm triplet_margin_loss
        """,
        promote="cbrt sqrt cross acosh asinh atan atan2 atanh cos digamma exp2 lgamma polygamma sin square",
    ),
    # FP16_FUNCS: Convolution, FullyConnected, gemm, einsum, matmul; `dot` and `tensordot` stand among the widest.
    # FP32_FUNCS: not in jax: the detection, calibration and output operators, LRN, softmin, khatri_rao, masked_softmax.
    # CONDITIONAL_FP32_FUNCS: an Activation that is softrelu (`softplus`), a LeakyReLU that is elu or selu.
    "mxnet": _preset(
        half="dot_general conv_general_dilated",
        full=f"""
            {_FULL_EVERYWHERE} {_LOSSES} atanh erf_inv integer_pow log1p logaddexp square digamma lgamma
            reduce_sum reduce_prod cumsum average mean polyval std trace var norm
            softmax log_softmax elu selu ctc_loss fft argsort top_k
            cholesky eig eigh lu qr svd triangular_solve
        """,
        promote="""
            cbrt sqrt
            dot tensordot cross kron hypot scatter-add
            acosh asinh atan atan2 cos polygamma sin
        """,
    ),
    # Low: MatrixMul, BatchedMatrixMul, Convolution. Three-dimensional convolutions only promote there; in jax they are
    # the same primitive. BatchNorm takes its input in low precision and its statistics in high: by parts.
    # High: TRUE_DIV, SQRT and what is listed; a mean always, while sums and products run in the dtype that comes in.
    "megengine": _preset(
        half="dot_general conv_general_dilated",
        full=f"""
            {_FULL_EVERYWHERE} acosh asinh atan2 atanh cos sin div integer_pow log1p sqrt
            logaddexp hard_sigmoid log_sigmoid mean
        """,
        promote="""
            cbrt
            reduce_sum reduce_prod cumsum cumprod scatter-add
            atan digamma erf_inv exp2 lgamma polygamma square
        """,
    ),
    # FP16: the convolutions, products of matrices, linear. Not in jax: prelu, conv_tbc, the RNN cells.
    # FP32: not in jax: dist, renorm, grid_sample, local_response_norm, softmin, and losses that optax lacks.
    # CASTS: not in jax: addcdiv, addcmul, bilinear; the arithmetic and the comparisons promote in jamp's table.
    "apex": _preset(
        half="dot_general conv_general_dilated",
        full=f"""
            {_FULL_EVERYWHERE} {_LOSSES} erf_inv integer_pow square
            reduce_sum reduce_prod cumsum cumprod std var norm cosine_similarity
            softmax log_softmax gelu ctc_loss triplet_margin_loss resize
        """,
        promote="""
            cbrt sqrt
            atan2 cross
            acosh asinh atan atanh cos digamma exp2 lgamma log1p polygamma sin
        """,
    ),
}
