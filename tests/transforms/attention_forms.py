"""Attention as libraries write it, each as a plain function of queries, keys and values `[batch, length, heads, 16]`.

Queries have four heads; forms with grouped heads read two of the keys' and values'. `p` holds what else they read.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH, LENGTH, HEADS, DEPTH = 2, 8, 4, 16


def flax_linen(q, k, v, p):
    q = q / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    weights = jnp.einsum("...qhd,...khd->...hqk", q, k)
    weights = jnp.where(p["mask"], weights, jnp.finfo(weights.dtype).min)
    weights = jax.nn.softmax(weights).astype(q.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def flax_with_bias(q, k, v, p):
    bias = lax.select(p["mask"] > 0, jnp.full(p["mask"].shape, 0.0), jnp.full(p["mask"].shape, -1e10))
    q = q / jnp.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", q, k) + bias)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def haiku(q, k, v, p):
    logits = jnp.einsum("...thd,...Thd->...htT", q, k)
    logits = logits * (1.0 / np.sqrt(DEPTH))
    logits = jnp.where(p["mask"], logits, -1e30)
    attn = jnp.einsum("...htT,...Thd->...thd", jax.nn.softmax(logits), v)
    return jnp.reshape(attn, (*q.shape[:2], -1))


def equinox(q, k, v, p):
    def one_head(q, k, v):
        logits = jnp.einsum("sd,Sd->sS", q / np.sqrt(DEPTH), k)
        logits = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), logits, jnp.finfo(logits.dtype).min)
        return jnp.einsum("sS,Sd->sd", jax.nn.softmax(logits, axis=-1), v)

    return jax.vmap(jax.vmap(one_head, in_axes=1, out_axes=1))(q, k, v)


def keras(q, k, v, p):
    scores = jnp.einsum("aecd,abcd->acbe", k, jnp.multiply(q, 1 / np.sqrt(DEPTH)))
    adder = (1.0 - p["mask"].astype("float32")) * -3e4
    return jnp.einsum("acbe,aecd->abcd", jax.nn.softmax(scores + adder), v)


def gpt2_hugging_face(q, k, v, p):
    causal = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH), bool))
    mask = jnp.logical_and(causal, p["keys"])
    bias = lax.select(mask > 0, jnp.full(mask.shape, 0.0), jnp.full(mask.shape, jnp.finfo(jnp.float32).min))
    q = q / jnp.sqrt(DEPTH)
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", q, k) + bias)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def gpt2_original(q, k, v, p):
    w = jnp.swapaxes(q, 1, 2) @ jnp.transpose(k, (0, 2, 3, 1)) * lax.rsqrt(float(DEPTH))
    i, j = jnp.arange(LENGTH)[:, None], jnp.arange(LENGTH)
    b = (i >= j).astype(w.dtype).reshape(1, 1, LENGTH, LENGTH)
    w = w * b - 1e10 * (1 - b)
    w = w - w.max(axis=-1, keepdims=True)
    e = jnp.exp(w)
    return (e / e.sum(axis=-1, keepdims=True)) @ jnp.swapaxes(v, 1, 2)


def t5(q, k, v, p):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + p["relative"][None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores.astype("float32"), axis=-1), v)


def nano_gpt(q, k, v, p):
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    att = q @ jnp.swapaxes(k, -2, -1) * (1.0 / np.sqrt(DEPTH))
    att = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH)))[None, None] == 0, -jnp.inf, att)
    return jnp.swapaxes(jax.nn.softmax(att, axis=-1) @ v, 1, 2).reshape(*q.shape[:1], LENGTH, -1)


def gemma_grouped(q, k, v, p):
    q = q.reshape(*q.shape[:2], 2, 2, DEPTH) * DEPTH**-0.5
    logits = jnp.einsum("BTKGH,BSKH->BTKGS", q, k[:, :, :2])
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None]
    logits = jnp.where(causal[:, :, None, None, :], logits, -2.3819763e38)
    out = jnp.einsum("BTKGS,BSKH->BTKGH", jax.nn.softmax(logits, axis=-1), v[:, :, :2])
    return out.reshape(*q.shape[:2], 4, DEPTH)


def llama_repeated(q, k, v, p):
    k, v = (jnp.repeat(x[:, :, :2], 2, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * DEPTH**-0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores + p["additive"]), v)


def multi_query(q, k, v, p):
    scores = jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0]) / 4.0
    scores = jnp.where(p["mask"], scores, -1e9)
    return jnp.einsum("bhts,bsd->bthd", jax.nn.softmax(scores), v[:, :, 0])


def of_jax(q, k, v, p):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def of_jax_masked(q, k, v, p):
    return jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], bias=p["additive"], mask=p["mask"], scale=0.5)


def vision(q, k, v, p):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    dots = jnp.matmul(q, k.swapaxes(-1, -2)) * DEPTH**-0.5
    out = jnp.matmul(jax.nn.softmax(dots, axis=-1), v)
    return out.transpose(0, 2, 1, 3).reshape(q.shape[0], LENGTH, -1)


def cross(q, k, v, p):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q[:, :6], k) * 0.25
    scores = jnp.where(p["keys"], scores, -1e6)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def alibi(q, k, v, p):
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1)
    distance = jnp.arange(LENGTH)[None, :] - jnp.arange(LENGTH)[:, None]
    bias = slopes[:, None, None] * distance
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0 + bias
    scores = jnp.where(distance <= 0, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def sliding_window(q, k, v, p):
    i, j = jnp.arange(LENGTH)[:, None], jnp.arange(LENGTH)[None, :]
    near = (j <= i) & (i - j < 4)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(near, scores, -1e9)), v)


def single_head(q, k, v, p):
    q, k, v = (x.reshape(BATCH, LENGTH, -1) for x in (q, k, v))
    return jax.nn.softmax(q @ k.transpose(0, 2, 1) / 8, axis=-1) @ v


def cosine(q, k, v, p):
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.exp(p["temperature"])[:, None, None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def divided(q, k, v, p):
    """By a temperature that is learned."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.exp(p["temperature"])[:, None, None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(0.5 * scores), v)


def bias_first(q, k, v, p):
    """A bias that is a product too, in front of the scores."""
    bias = jnp.tanh(p["relative"]) @ p["relative"][0]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(bias + jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4), v)


def gate_first(q, k, v, p):
    """What scales the scores of a query, and is made by a product, in front of them."""
    gate = jax.nn.sigmoid(jnp.einsum("bqhd,hq->bhq", q, p["relative"][:, :, 0]))[..., None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(gate * jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)


def diffusers(q, k, v, p):
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(BATCH * HEADS, LENGTH, DEPTH) for x in (q, k, v))
    scores = jnp.einsum("b i d, b j d->b i j", q, k) * DEPTH**-0.5
    out = jnp.einsum("b i j, b j d -> b i d", jax.nn.softmax(scores, axis=2), v)
    return out.reshape(BATCH, HEADS, LENGTH, DEPTH).transpose(0, 2, 1, 3)


def unbatched(q, k, v, p):
    scores = jnp.einsum("qhd,khd->hqk", q[0], k[0]) / 4.0
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v[0])


def bert_hugging_face(q, k, v, p):
    """With a mask of heads."""
    bias = lax.select(p["keys"], jnp.full(p["keys"].shape, 0.0), jnp.full(p["keys"].shape, -1e38))
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(DEPTH), k) + bias)
    weights = jnp.einsum("...hqk,h->...hqk", weights, jnp.array([1, 1, 0, 1]))
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def swin(q, k, v, p):
    """Windows, merged with the batch, with a bias and a mask that says which windows are cut by the border."""
    scores = (q * DEPTH**-0.5).transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1) + p["relative"][None]
    scores = scores.reshape(1, BATCH, HEADS, LENGTH, LENGTH) + p["additive"][:, 0][None, :, None]
    weights = jax.nn.softmax(scores.reshape(BATCH, HEADS, LENGTH, LENGTH), axis=-1)
    return (weights @ v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def rotary(q, k, v, p):
    def rotate(x):
        angles = jnp.arange(LENGTH)[:, None] * 10.0 ** -jnp.arange(DEPTH // 2)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)) / 4.0
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@functools.partial(jax.jit, static_argnames="scale")
def jitted(q, k, v, p, scale=0.25):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale), v)


def rematerialized(q, k, v, p):
    return jax.checkpoint(jitted)(q, k, v, p)


def scanned(q, k, v, p):
    def layer(x, scale):
        return jitted(x * scale, k, v, p), None

    return lax.scan(layer, q, jnp.linspace(0.5, 1, 3))[0]


# Masks that are constants of the program, and masks that are made outside of a loop or a call.

CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
ADDED = jnp.where(CAUSAL, 0.0, -jnp.inf)[None, None]


HIDDEN = np.triu(np.ones((1, LENGTH, LENGTH)), 1).astype(bool)
WINDOW = jnp.asarray(CAUSAL & ~np.tril(CAUSAL, -3))
NEAR = np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH)) < 3


def attend(q, k, v, mask):
    scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def constant(q, k, v, p):
    return attend(q, k, v, CAUSAL)


def constant_added(q, k, v, p):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4 + ADDED
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def constant_of_what_is_hidden(q, k, v, p):
    scores = jnp.where(HIDDEN, -jnp.inf, jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def constant_window(q, k, v, p):
    return attend(q, k, v, WINDOW)


def constant_in_a_loop(q, k, v, p):
    return lax.scan(lambda x, _: (attend(x, k, v, CAUSAL), None), q, None, length=2)[0]


def made_outside_of_a_loop(q, k, v, p):
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    layer = jax.checkpoint(lambda x, k, v, mask: jax.jit(attend)(x, k, v, mask))
    return lax.scan(lambda x, _: (layer(x, k, v, mask), None), q, None, length=2)[0]


def constant_with_offset(q, k, v, p):
    return attend(q[:, 2:], k, v, CAUSAL[2:])


def constant_symmetric(q, k, v, p):
    return attend(q, k, v, NEAR)


def shifted_behind_views(q, k, v, p):
    """Scores and their maximum, merged one by one, as Keras may have them."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4
    merged = (BATCH * HEADS, LENGTH)
    e = jnp.exp(scores.reshape(*merged, LENGTH) - lax.stop_gradient(scores.max(-1)).reshape(*merged, 1))
    weights = (e / e.sum(-1, keepdims=True)).reshape(scores.shape)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


# What the masks are that kernels compute on their own, though the written form is given them.
MASKS = {
    "constant": CAUSAL,
    "masked_softmax_causal": CAUSAL,
    "constant_added": ADDED,
    "constant_of_what_is_hidden": HIDDEN,
    "constant_window": WINDOW,
    "constant_in_a_loop": CAUSAL,
    "made_outside_of_a_loop": CAUSAL,
    "constant_with_offset": CAUSAL[2:],
    "constant_symmetric": NEAR,
}


def deberta(q, k, v, p):
    """With a bias that the library picks by a function under `jax.jit`."""
    distance = jnp.asarray(np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH)))
    to_position = jnp.einsum("bqhd,khd->bhqk", q, k[0])
    bias = jnp.take_along_axis(to_position, jnp.broadcast_to(distance, to_position.shape), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4 + bias), v)


def masked_softmax_causal(q, k, v, p):
    """JAX's own masked softmax, of a mask under which each query sees a key."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, where=CAUSAL), v)


FORMS = {
    form.__name__: form
    for form in (
        flax_linen, flax_with_bias, bert_hugging_face, haiku, equinox, keras, gpt2_hugging_face,
        gpt2_original, t5, nano_gpt,
        gemma_grouped, llama_repeated, multi_query, of_jax, of_jax_masked, vision, cross, alibi, sliding_window,
        single_head, cosine, divided, bias_first, gate_first, diffusers, unbatched, swin, rotary, jitted,
        rematerialized, scanned, shifted_behind_views,
        constant, constant_added, constant_of_what_is_hidden, constant_window, constant_in_a_loop,
        made_outside_of_a_loop, constant_with_offset, constant_symmetric, deberta, masked_softmax_causal,
    )
}  # fmt: skip


# Recognised, and left as written for a reason.


def soft_capped(q, k, v, p):
    scores = jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 50) * 50
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def dropped(q, k, v, p):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, weights.shape)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(keep, weights * 2, 0.0), v)


def returns_weights(q, k, v, p):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v) + weights.mean()


def reads_scores(q, k, v, p):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v) + jnp.max(scores)


def additive(q, k, v, p):
    scores = jnp.tanh(q[:, :, None] + k[:, None]).mean(-1)
    return jnp.einsum("bqkh,bkhd->bqhd", jax.nn.softmax(scores, axis=2), v)


def in_float32(q, k, v, p):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v, precision="highest")


def of_seven_features(q, k, v, p):
    return jitted(q[..., :7], k[..., :7], v[..., :7], p)


def masked_softmax(q, k, v, p):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0
    mask = jnp.broadcast_to(p["mask"], scores.shape)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, where=mask), v)


def masked_softmax_otherwise(q, k, v, p):
    """Whose weights are masked more than its scores."""
    scores = jnp.where(CAUSAL, jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0, -1e30)
    weights = jnp.where(np.tril(CAUSAL, -1), jax.nn.softmax(scores), 0.0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def mask_too_weak(q, k, v, p):
    scores = jnp.where(p["mask"], jnp.einsum("bqhd,bkhd->bhqk", q, k), -3.0)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def scored(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4


def mixed(weights, v):
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def exponential_of_a_log_softmax(q, k, v, p):
    return mixed(jnp.exp(jax.nn.log_softmax(scored(q, k))), v)


def without_logsumexp(q, k, v, p):
    scores = scored(q, k)
    return mixed(jnp.exp(scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)), v)


def normalized_after(q, k, v, p):
    e = jnp.exp(scored(q, k))
    return mixed(e, v) / jnp.swapaxes(e.sum(-1), 1, 2)[..., None]


def with_sinks(q, k, v, p):
    scores = scored(q, k)
    sinks = jnp.broadcast_to(p["temperature"][None, :, None, None], (*scores.shape[:-1], 1))
    return mixed(jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1], v)


def softmax_plus_one(q, k, v, p):
    scores = scored(q, k)
    m = jnp.maximum(scores.max(-1, keepdims=True), 0)
    e = jnp.exp(scores - m)
    return mixed(e / (jnp.exp(-m) + e.sum(-1, keepdims=True)), v)


def by_sigmoid(q, k, v, p):
    return mixed(jax.nn.sigmoid(scored(q, k) - np.log(LENGTH)), v)


def by_relu(q, k, v, p):
    return mixed(jax.nn.relu(scored(q, k)) / LENGTH, v)


def linear_attention(q, k, v, p):
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.einsum("bkhd,bkhe->bhde", k, v)
    return jnp.einsum("bqhd,bhde->bqhe", q, state) / jnp.einsum("bqhd,bhd->bqh", q, k.sum(1))[..., None]


def differential(q, k, v, p):
    return mixed(jax.nn.softmax(scored(q, k)) - 0.3 * jax.nn.softmax(scored(q[..., ::-1], k)), v)


def entmax(q, k, v, p):
    weights = jax.nn.softmax(scored(q, k)) ** 2
    return mixed(weights / weights.sum(-1, keepdims=True), v)


def talking_heads(q, k, v, p):
    weights = jax.nn.softmax(scored(q, k))
    return mixed(jnp.einsum("bhqk,hg->bgqk", weights, jnp.sin(jnp.arange(16.0).reshape(HEADS, HEADS))), v)


def strongest(q, k, v, p):
    scores = scored(q, k)
    return mixed(jax.nn.softmax(jnp.where(scores >= lax.top_k(scores, 4)[0][..., -1:], scores, -1e9)), v)


def over_queries(q, k, v, p):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-2)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def over_heads(q, k, v, p):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def divided_twice(q, k, v, p):
    e = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 16)
    return jnp.einsum("bhqk,bkhd->bqhd", e / e.sum((-1, -2), keepdims=True), v)


def other_sum(q, k, v, p):
    e = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 16)
    return jnp.einsum("bhqk,bkhd->bqhd", e / (1 + e.sum(-1, keepdims=True)), v)


REFUSED = {
    form.__name__: (form, reason)
    for form, reason in (
        (soft_capped, "tanh"),
        (dropped, "dropout"),
        (returns_weights, "read elsewhere"),
        (reads_scores, "read elsewhere"),
        (additive, "no product of queries and keys"),
        (in_float32, "products are float32"),
        (of_seven_features, "7 features"),
        (masked_softmax, "masked after the softmax too, so that a query without a key gets zero"),
        (masked_softmax_otherwise, "masked after the softmax"),
        (mask_too_weak, "-3"),
        (exponential_of_a_log_softmax, "log-softmax"),
        (without_logsumexp, "log-softmax"),
        (normalized_after, "not divided by their sum before"),
        (with_sinks, "attention sinks"),
        (softmax_plus_one, "added to the sum"),
        (by_sigmoid, "no softmax: its scores go through `logistic`"),
        (by_relu, "no softmax: its scores go through `max`"),
        (linear_attention, "linear attention"),
        (differential, "several softmaxes"),
        (entmax, "more than a softmax"),
        (talking_heads, "over another axis"),
        (strongest, "read elsewhere"),
        (over_queries, "over another axis"),
        (over_heads, "over another axis"),
        (divided_twice, "over another axis"),
        (other_sum, "added to the sum"),
    )
}


# No attention.


def linear(q, k, v, p):
    state = jnp.einsum("bkhd,bkhe->bhde", jax.nn.softmax(k, axis=1), v)
    return jnp.einsum("bqhd,bhde->bqhe", q, state)


def layers(q, k, v, p):
    """Layers, gates, experts: products with something in between."""
    x = jax.nn.silu(q @ k[0, 0].T) @ k[0, 0]
    gates = jax.nn.softmax(x @ v[0, 0].T)
    experts = jnp.einsum("blhe,ehd->blhde", gates, k[0, :HEADS].transpose(1, 0, 2))
    return jnp.einsum("ehf,ehd->efd", jax.nn.gelu(jnp.einsum("bhd,ehd->ehb", q[0], k[0])), v[0]) + experts.sum()


NOT = {form.__name__: form for form in (linear, layers)}
