"""`attention=fused`: attentions are recognised, a kernel is told the right thing, and elsewhere nothing changes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import jamp
from jamp._compat import inner_jaxprs, open_jaxpr
from jamp.transforms.emission.kernels import dot_product
from tests.transforms.attention_forms import BATCH, CAUSAL, DEPTH, FORMS, HEADS, LENGTH, MASKS, NOT, REFUSED, attend

FUSED, WRITTEN = "O2:bfloat16,attention=fused", "O2:bfloat16"


def inputs(seed=0):
    keys = jax.random.split(jax.random.key(seed), 8)
    q, k, v = (jax.random.normal(key, (BATCH, LENGTH, HEADS, DEPTH)) for key in keys[:3])
    mask = jax.random.bernoulli(keys[3], 0.7, (BATCH, 1, LENGTH, LENGTH)) | jnp.eye(LENGTH, dtype=bool)
    p = {
        "mask": mask,
        "keys": jnp.arange(LENGTH)[None, None, None] < jnp.array([5, 8])[:, None, None, None],
        "additive": jnp.where(mask, 0.0, -1e9),
        "relative": jax.random.normal(keys[4], (HEADS, LENGTH, LENGTH)),
        "temperature": jax.random.normal(keys[5], (HEADS,)),
    }
    return q, k, v, p


def results(form, policy, seed=0):
    """Value and gradients of a form, behind layers that make its operands."""
    q, k, v, p = inputs(seed)

    def program(q, k, v, p):
        return form(jnp.sin(q), jnp.sin(k), jnp.sin(v), p)

    def loss(q, k, v, relative, temperature):
        out = jamp.cast_fn(program, policy)(q, k, v, p | {"relative": relative, "temperature": temperature})
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))
    return grad(q, k, v, p["relative"], p["temperature"])


def emitted(form, policy):
    """What `cast_fn` makes of a form, without addresses of functions."""
    return re.sub(" at 0x[0-9a-fX]+", "", str(jax.make_jaxpr(jamp.cast_fn(form, policy))(*inputs())))


def assert_close(got, expected, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1e-6 + np.abs(b).max()))


def fused_equations(jaxpr):
    found = []
    for eqn in open_jaxpr(jaxpr).eqns:
        found += [eqn] if eqn.primitive.name == "jamp_attention" else []
        for inner in inner_jaxprs(eqn):
            found += fused_equations(inner)
    return found


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_recognised(form):
    (found,) = jamp.report(form, *inputs(), policy=FUSED).attentions
    assert found.kernels.get("cuda") == "cuDNN"


@pytest.mark.parametrize(
    ("name", "causal", "window"),
    [
        ("constant", True, None),
        ("constant_added", True, None),
        ("constant_of_what_is_hidden", True, None),
        ("constant_window", True, 2),
        ("constant_in_a_loop", True, None),
        ("made_outside_of_a_loop", True, None),
        ("constant_with_offset", False, None),
        ("constant_symmetric", False, None),
    ],
)
def test_a_mask_of_places_is_known_wherever_it_is_made(name, causal, window):
    (eqn,) = fused_equations(jax.make_jaxpr(jamp.cast_fn(FORMS[name], FUSED))(*inputs()))
    told = eqn.params["attention"]
    assert (told.causal, told.window, bool(told.places), told.masks) == (causal, window, not causal, ())


def test_a_mask_that_differs_between_calls_is_an_operand():
    def program(q, k, v):
        called = jax.jit(attend)
        return called(q, k, v, CAUSAL) + called(q, k, v, CAUSAL.T)

    jaxpr = jax.make_jaxpr(jamp.cast_fn(program, FUSED))(*inputs()[:3])
    masks = [eqn.params["attention"].masks for eqn in fused_equations(jaxpr)]
    assert [len(each) for each in masks] == [1, 1]


def test_a_mask_that_is_an_argument_is_not_known_to_be_causal():
    x = jax.ShapeDtypeStruct((1, 128, HEADS, DEPTH), jnp.float32)
    mask = np.tril(np.ones((128, 128), bool))
    (known,) = jamp.report(lambda q, k, v: attend(q, k, v, mask), x, x, x, policy=FUSED).attentions
    (given,) = jamp.report(attend, x, x, x, jnp.asarray(mask), policy=FUSED).attentions
    assert set(known.kernels) == {"cuda", "tpu"}
    assert set(given.kernels) == {"cuda"}
    assert "not where it is an argument" in given.reasons["tpu"]


def _ones(dtype=None):
    return jnp.ones((LENGTH, LENGTH), dtype)


# What is done with scores by what a function makes of no argument, and whether a causal mask is all of it.
MADE_INSIDE = {
    "a boolean subtracted": (lambda s: s - 1e4 * (1 - jnp.tril(_ones(bool))), True),
    "an upper triangle subtracted": (lambda s: s - jnp.triu(1e9 * _ones(), 1), True),
    "an upper triangle added": (lambda s: s + jnp.triu(_ones(), 1) * -1e9, True),
    "scores times a mask": (lambda s: s * jnp.tril(_ones()) - 1e10 * (1 - jnp.tril(_ones())), True),
    "where an upper triangle is": (lambda s: jnp.where(jnp.triu(_ones(bool), 1), -1e9, s), True),
    "where none is": (lambda s: jnp.where(~jnp.triu(_ones(bool), 1), s, -1e9), True),
    "where one is one": (lambda s: jnp.where(jnp.triu(_ones(), 1) == 1, -1e9, s), True),
    "a window by two triangles": (
        lambda s: jnp.where(jnp.tril(_ones(bool)) & jnp.triu(_ones(bool), -3), s, -1e9),
        True,
    ),
    "an identity subtracted": (lambda s: s - jnp.eye(LENGTH) * 1e9, False),
    "a counter subtracted": (lambda s: s - jnp.arange(LENGTH, dtype=jnp.float32), False),
    "where a lower triangle is": (lambda s: jnp.where(jnp.tril(_ones(bool), -1), -1e9, s), False),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(("scored", "causal"), MADE_INSIDE.values(), ids=MADE_INSIDE)
def test_masks_and_biases_that_are_made_inside(scored, causal):
    def program(q, k, v):
        scores = scored(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    (eqn,) = fused_equations(jax.make_jaxpr(jamp.cast_fn(program, FUSED))(*inputs()[:3]))
    attention = eqn.params["attention"]
    assert attention.causal is causal
    keys = jax.random.split(jax.random.key(1), len(eqn.invars))
    values = [random_value(key, var.aval) for key, var in zip(keys, eqn.invars, strict=True)]
    (written,) = jaxpr_as_fun(eqn.params["written"])(*values)
    assert_close(dot_product(attention, *values, implementation="xla").astype(written.dtype), written, 0.03)
    assert_close(jamp.cast_fn(program, FUSED)(*inputs()[:3]), jamp.cast_fn(program, WRITTEN)(*inputs()[:3]), 2**-7)


@pytest.mark.parametrize(
    ("compare", "fuses"),
    [
        (lambda ones: ones == 0, True),
        (lambda ones: ones < 1, True),
        (lambda ones: ones <= 0.5, True),
        (lambda ones: ~(ones >= 1), True),
        (lambda ones: ones.astype(bool) != True, True),  # noqa: E712
        (lambda ones: ones < 0, False),  # Nowhere.
        (lambda ones: 2 * ones > 1.5, False),  # Not of zeros and ones.
    ],
    ids=["is zero", "less than one", "at most a half", "not one", "not true", "never", "of other numbers"],
)
def test_a_mask_of_zeros_and_ones_is_compared_with_any_number(compare, fuses):
    def program(q, k, v):
        return attend(q, k, v, ~compare(jnp.tril(jnp.ones((LENGTH, LENGTH)))))

    (eqn,) = fused_equations(jax.make_jaxpr(jamp.cast_fn(program, FUSED))(*inputs()[:3]))
    attention = eqn.params["attention"]
    assert attention.causal is fuses
    assert len(attention.masks) == (not fuses)


def _window(s):
    places = jnp.arange(s.shape[-2])[:, None] - jnp.arange(s.shape[-1])
    return jnp.where((places >= 0) & (places <= 3), s, -1e9)


ODD = {
    "plain": lambda s: s,
    "causal": lambda s: jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e9),
    "a bias": lambda s: s + jnp.sin(jnp.arange(s.shape[-2] * s.shape[-1], dtype=jnp.float32)).reshape(s.shape[-2:]),
    "a window": _window,
    "an offset": lambda s: jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool), 2), s, -1e9),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("lengths", [(7, 7), (7, 8), (8, 7)], ids=str)
@pytest.mark.parametrize("scored", ODD.values(), ids=ODD)
def test_odd_lengths_are_filled_up(scored, lengths, monkeypatch):
    """JAX refuses derivatives of cuDNN's attention where a number of queries or keys is odd."""

    def program(q, k, v):
        weights = jax.nn.softmax(scored(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    of_jax, given = jax.nn.dot_product_attention, []

    def noted(q, k, v, **settings):
        given.append((q.shape[1], k.shape[1], *(int(x[0]) for x in lengths_of(settings))))
        bias, mask = settings["bias"], settings["mask"]
        assert all(x is None or x.shape[2:] == (q.shape[1], k.shape[1]) for x in (bias, mask))
        assert settings["local_window_size"] is None or not any(size % 2 for size in lengths)
        return of_jax(q, k, v, **settings)

    def lengths_of(settings):
        return [settings["query_seq_lengths"], settings["key_value_seq_lengths"]]

    q, k, v = inputs()[:3]
    q, k, v = q[:, : lengths[0]], k[:, : lengths[1]], v[:, : lengths[1]]
    report = jamp.report(program, q, k, v, policy=FUSED).attentions[0]
    assert report.kernels.get("cuda") == "cuDNN"
    (eqn,) = fused_equations(jax.make_jaxpr(jamp.cast_fn(program, FUSED))(q, k, v))
    keys = jax.random.split(jax.random.key(1), len(eqn.invars))
    values = [random_value(key, var.aval) for key, var in zip(keys, eqn.invars, strict=True)]
    monkeypatch.setattr(jax.nn, "dot_product_attention", noted)
    kernel = functools.partial(dot_product, eqn.params["attention"], implementation="xla")
    written = jaxpr_as_fun(eqn.params["written"])

    def derived(function):
        out, pull = jax.vjp(lambda *args: function(*args).astype(jnp.float32), *values)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    assert_close(derived(kernel), derived(lambda *args: written(*args)[0]), 0.03)
    assert given == [tuple(size + size % 2 for size in lengths) + lengths]


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", ["flax_linen", "gpt2_original", "t5", "gemma_grouped", "of_jax_masked", "scanned"])
def test_elsewhere_as_written(name):
    assert_close(results(FORMS[name], FUSED), results(FORMS[name], WRITTEN), 2**-7)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_kernel_is_told_what_is_written(form):
    """What cuDNN is to compute, computed by XLA, is what the equations say, for any operands; gradients too."""
    jaxpr = jax.make_jaxpr(jamp.cast_fn(form, FUSED))(*inputs())
    (eqn,) = fused_equations(jaxpr)
    keys = jax.random.split(jax.random.key(1), len(eqn.invars))
    values = [random_value(key, var.aval) for key, var in zip(keys, eqn.invars, strict=True)]
    moving = [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if form.__name__ in MASKS:  # A kernel makes the mask on its own.
        (place,) = (i for i, x in enumerate(values) if x.ndim and i not in read(eqn.params["attention"]))
        values[place] = jnp.asarray(MASKS[form.__name__], values[place].dtype).reshape(values[place].shape)
        moving = [i for i in moving if i != place]

    def derived(function):
        def of_moving(*moved):
            merged = dict(enumerate(values)) | dict(zip(moving, moved, strict=True))
            return function(*merged.values()).astype(jnp.float32)

        out, pull = jax.vjp(of_moving, *(values[i] for i in moving))
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    kernel = functools.partial(dot_product, eqn.params["attention"], implementation="xla")
    written = jaxpr_as_fun(eqn.params["written"])
    assert_close(*jax.jit(lambda: (derived(kernel), derived(lambda *args: written(*args)[0])))(), 0.03)


def read(attention):
    """The operands that a kernel reads."""
    pairs = [operand for operand, *_ in (*attention.biases, *attention.masks, *attention.factors)]
    own = (attention.query, attention.key, attention.value, *attention.weighted)
    return {operand.place for operand in (*own, *pairs)}


def random_value(key, aval):
    if aval.dtype == bool:
        return jax.random.bernoulli(key, 0.7, aval.shape).at[..., 0].set(True) if aval.ndim else jnp.array(True)
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return jnp.arange(int(np.prod(aval.shape)), dtype=aval.dtype).reshape(aval.shape) % 3
    return jax.random.normal(key, aval.shape, aval.dtype)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(("form", "reason"), REFUSED.values(), ids=REFUSED)
def test_stays_as_written_for_a_reason(form, reason):
    found = jamp.report(form, *inputs(), policy=FUSED).attentions
    assert [each.fused for each in found] == [False]
    assert reason in str(found[0].reasons)
    assert emitted(form, FUSED) == emitted(form, WRITTEN)


@pytest.mark.parametrize("form", NOT.values(), ids=NOT)
def test_is_no_attention(form):
    assert not any(found.fused for found in jamp.report(form, *inputs(), policy=FUSED).attentions)
    assert emitted(form, FUSED) == emitted(form, WRITTEN)


def program(q, k, v):
    return FORMS["jitted"](jnp.sin(q), jnp.sin(k), jnp.sin(v), {})


def loss(q, k, v, policy=FUSED):
    return jnp.sum(jamp.cast_fn(program, policy)(q, k, v) ** 2)


def test_vmap_adds_to_the_batch():
    """Also where examples share an operand, whose cotangents are each example's own."""
    q, k, v, _ = inputs()

    def each(policy):
        def one(q, k, v):
            return loss(q[None], k[None], v[None], policy)

        return jax.vmap(jax.grad(one, (0, 1, 2)), (0, None, 0))

    assert len(fused_equations(jax.make_jaxpr(each(FUSED))(q, k[0], v))) == 2
    assert_close(jax.jit(each(FUSED))(q, k[0], v), jax.jit(each(WRITTEN))(q, k[0], v), 0)


def test_forward_mode_and_second_derivatives_are_those_of_the_written_form():
    q, k, v, _ = inputs()

    def derivatives(q, policy):
        grad = jax.grad(loss)
        _, along = jax.jvp(lambda q: loss(q, k, v, policy), (q,), (jnp.cos(q),))
        return along, jax.grad(lambda q: jnp.vdot(grad(q, k, v, policy), jnp.cos(q)))(q)

    run = jax.jit(derivatives, static_argnums=1)
    assert_close(run(q, FUSED), run(q, WRITTEN), 2**-6)


def test_each_platform_is_lowered_for_with_its_own_kernel():
    x = jax.ShapeDtypeStruct((2, 128, HEADS, DEPTH), jnp.float32)
    traced = jax.jit(jax.grad(loss)).trace(x, x, x)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_a_kernel_that_xla_cannot_divide_is_one_for_each_device_of_a_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    x = jax.ShapeDtypeStruct((4, 128, HEADS, DEPTH), jnp.float32, sharding=jax.NamedSharding(mesh, rows))
    grad = jax.grad(loss)
    with pytest.warns(UserWarning, match="shard_map"):
        divided = jax.jit(grad).trace(x, x, x).lower(lowering_platforms=("tpu",)).as_text()
    mapped = jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    for_each = mapped.trace(x, x, x).lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in divided, "tpu_custom_call" in for_each) == (False, True)


def test_sizes_may_be_unknown():
    (b,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, LENGTH, HEADS, DEPTH), jnp.float32)
    (found,) = jamp.report(program, x, x, x, policy=FUSED).attentions
    assert "not known" in str(found.reasons)


def test_a_kernel_that_is_not_to_be_had_is_no_error(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    q, k, v, _ = inputs()
    with pytest.warns(UserWarning, match="without cuDNN: cuDNN is not detected"):
        exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=("cpu", "cuda"))(q, k, v)
    assert_close(exported.call(q, k, v), jax.jit(jax.grad(loss))(q, k, v), 0)


def test_the_weights_are_not_kept():
    q, k, v, _ = inputs()
    kept = {policy: jamp.report(program, q, k, v, policy=policy).residuals for policy in (FUSED, WRITTEN)}
    size = BATCH * HEADS * LENGTH * LENGTH
    assert {policy: any(np.prod(each.shape) == size for each in found) for policy, found in kept.items()} == {
        FUSED: False,
        WRITTEN: True,
    }


def test_a_kernel_of_the_users_that_takes_half_alone_is_told_how_to_be_written(monkeypatch):
    """cuDNN's attention refuses float32 while it is traced, where there is a cuDNN; there is none here."""

    def refusing(q, k, v, implementation):
        raise NotImplementedError(f"Q must be fp16/bf16/fp8_e4m3fn/fp8_e5m2, got {q.dtype}")

    monkeypatch.setattr(jax.nn, "dot_product_attention", refusing)
    q, k, v, _ = inputs()
    with pytest.raises(NotImplementedError, match="must be fp16/bf16") as caught:
        jamp.cast_fn(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn"))(q, k, v)
    assert "attention=fused" in "".join(caught.value.__notes__)


def attends(q, k, v, implementation=None):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / DEPTH**0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def kernel_of_half(q, k, v, implementation):
    """What cuDNN's attention is, and refuses."""
    assert implementation == "cudnn"
    if q.dtype not in ("float16", "bfloat16") or len({q.dtype, k.dtype, v.dtype}) > 1:
        raise NotImplementedError(f"Q must be fp16/bf16/fp8_e4m3fn/fp8_e5m2, got {q.dtype}")
    return attends(q, k, v)


@pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:bfloat16", "O2:float16", FUSED])
def test_a_model_that_calls_a_kernel_of_half_itself_runs(monkeypatch, policy):
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel_of_half)
    q, k, v, _ = inputs()
    w = jax.random.normal(jax.random.key(4), (HEADS * DEPTH, 8)) / DEPTH

    def model(w, q, scale):
        attended = jax.nn.dot_product_attention(q * scale, k.astype(q.dtype), v.astype(q.dtype), implementation="cudnn")
        return (jnp.tanh(attended.reshape(*q.shape[:2], -1) @ w) ** 2).mean(), attended

    cast = jamp.cast_fn(model, policy)
    (value, attended), grads = jax.jit(jax.value_and_grad(cast, (0, 1), has_aux=True))(w, q, 2.0)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attends)
    (expected, exact), exact_grads = jax.value_and_grad(model, (0, 1), has_aux=True)(w, q, 2.0)
    assert (value.dtype, attended.dtype, *(g.dtype for g in grads)) == (jnp.float32,) * 4
    for actual, reference in zip([value, attended, *grads], [expected, exact, *exact_grads], strict=True):
        assert jnp.linalg.norm(actual - reference) <= 0.03 * jnp.linalg.norm(reference)
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel_of_half)
    assert jamp.report(model, w, q, 2.0, policy=policy).forward.share == 1.0


def test_what_fails_in_half_too_is_the_cause(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel_of_half)
    q, k, v, _ = inputs()

    def model(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
        return out if float(q.sum()) > 0 else -out

    with pytest.raises(NotImplementedError) as caught:
        jamp.cast_fn(model)(q, k, v)
    assert isinstance(caught.value.__cause__, jax.errors.ConcretizationTypeError)
