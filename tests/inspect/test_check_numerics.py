"""`check_numerics`: a step that is watched while it runs, and `first_nonfinite` where nothing can run step by step."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import Mesh, PartitionSpec

import jamp
from tests.transforms.harness import find, trace

BAD = jnp.float32([[1, 1], [-1, 0]])  # Its logarithm has one NaN and one infinity.
P = PartitionSpec


LINE = "test_check_numerics.py:26"


def log_in_scope(x):
    with jax.named_scope("head"):
        y = jnp.log(x)
    with jax.named_scope("loss"):
        return (y * 2).sum()


def made(numerics):
    return [(op.operation, op.scope, op.infinities, op.nans) for op in numerics.operations]


def test_names_what_made_it_and_not_what_it_went_through():
    loss, numerics = jax.jit(jamp.check_numerics(log_in_scope))(BAD)
    assert jnp.isnan(loss) and not numerics.ok and not numerics
    assert made(numerics) == [("log", "head", 1, 1)]
    assert numerics.first.line.endswith(LINE)
    assert "log, head" in str(numerics)


def test_all_is_well():
    loss, numerics = jax.jit(jamp.check_numerics(log_in_scope))(jnp.ones(2))
    assert (loss, numerics.ok, numerics.first, numerics.operations) == (0, True, None, ())
    assert str(numerics) == "all is finite"


def test_what_is_discarded_or_written_or_given_does_not_count():
    def masked(x, mask):
        return jax.nn.softmax(jnp.where(x > 0, jnp.log(x), -jnp.inf) + mask)

    run = jax.jit(jamp.check_numerics(masked))
    assert run(jnp.float32([1, 2, -1]), jnp.float32([0, -jnp.inf, 0]))[1].ok
    _, numerics = jax.jit(jamp.check_numerics(lambda x: x * 2))(jnp.float32([jnp.nan]))
    assert numerics.ok and int(numerics.reached) == 1 and "came in" in str(numerics)


@pytest.mark.parametrize(
    ("scopes", "found"),
    [("head", 1), ("h*", 1), (("head/*", "other"), 1), (LINE, 1), ("loss", 0)],
)
def test_scopes_and_lines(scopes, found):
    _, numerics = jax.jit(jamp.check_numerics(log_in_scope, scopes))(BAD)
    assert len(numerics.operations) == found and int(numerics.reached) == 1


def test_a_train_step_that_skips_is_watched_and_does_the_same():
    tx = jamp.mixed_precision(optax.adam(1e-2), "O2:float16")

    def loss(params, x):
        with jax.named_scope("product"):
            h = x @ params["w"]
        with jax.named_scope("exponential"):
            return jnp.exp(h).sum()

    def step(params, state, x):
        loss_fn = jamp.cast_fn(loss, "O2:float16")
        value, grads = jamp.scaled_value_and_grad(loss_fn, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {"w": jnp.full((4, 4), 0.1)}
    state = tx.init(params)
    checked = jax.jit(jamp.check_numerics(step))
    for size in (0.5, 300.0):
        x = jnp.full((2, 4), size)
        ours, numerics = checked(params, state, x)
        jax.tree.map(np.testing.assert_array_equal, ours, jax.jit(step)(params, state, x))
        assert numerics.ok == (size == 0.5)
    assert numerics.first.operation == "exp" and numerics.first.scope == "exponential"


def test_loops_are_entered_and_the_iteration_named():
    def steps(x):
        def one(c, i):
            with jax.named_scope("root"):
                g = jnp.sqrt(c - i)
            return jnp.where(jamp.all_finite(g), c, c), None  # A train loop that skips: nothing is left in the results.

        return lax.scan(one, x, jnp.arange(5.0))[0]

    x, numerics = jax.jit(jamp.check_numerics(steps))(jnp.float32([2.5]))
    assert (x, made(numerics), numerics.first.iteration) == (2.5, [("sqrt", "root", 0, 2)], 3)

    def halves(x):
        return lax.while_loop(lambda c: c[0] < 6, lambda c: (c[0] + 1, jnp.log(c[1])), (0, x))[1]

    _, numerics = jax.jit(jamp.check_numerics(halves))(jnp.float32(20.0))
    assert numerics.first.iteration == 4 and numerics.first.operation == "log"
    reverse = jax.jit(jamp.check_numerics(lambda x: lax.scan(lambda c, y: (c, jnp.log(y)), 0, x, reverse=True)[1]))
    assert reverse(jnp.float32([1, 1, -1, 1]))[1].first.iteration == 2


def discarded_beside(x):
    """What reaches the result is another operation's."""
    with jax.named_scope("safe"):
        a = jnp.where(x > 0, jnp.log(x), 0.0)
    with jax.named_scope("culprit"):
        return a + 1 / (x - 2)


def discarded_at_first(x):
    """A loop that takes what a branch makes in its sixth iteration alone."""

    def body(c, i):
        with jax.named_scope("cell"):
            return jnp.where(i == 5, jnp.log(c - 9), c), None

    return lax.scan(body, x, jnp.arange(10))[0]


def handed_to_the_next(x):
    """What the fourth iteration makes is an operand of the first operation of the fifth."""

    def body(state):
        i, y = state
        zero = y * 0
        with jax.named_scope("quotient"):
            return i + 1, jnp.where(i > 2, zero + 1 / zero, y)

    return lax.while_loop(lambda state: state[0] < 6, body, (0, x))[1]


def handed_back(x):
    """The same, from the last iteration to the first."""

    def body(c, i):
        zero = c * 0
        with jax.named_scope("quotient"):
            return jnp.where(i < 3, zero + 1 / zero, c), None

    return lax.scan(body, x, jnp.arange(6), reverse=True)[0]


def chosen_in_a_function(x):
    with jax.named_scope("safe"):
        choose = jax.jit(lambda known, other: jnp.where(x > 0, known, other))
        a = choose(jnp.abs(x), jnp.sqrt(-jnp.abs(x)))
    with jax.named_scope("root"):
        return a + jnp.sqrt(x - 2)


@pytest.mark.parametrize(
    ("fn", "operation", "scope", "iteration"),
    [
        (discarded_beside, "div", "culprit", None),
        (discarded_at_first, "log", "cell", 5),
        (handed_to_the_next, "div", "quotient", 3),
        (handed_back, "div", "quotient", 2),
        (chosen_in_a_function, "sqrt", "root", None),
    ],
)
def test_what_is_discarded_does_not_count_beside_what_is_not(fn, operation, scope, iteration):
    x = jnp.float32([1, 2, 3])
    first = jax.jit(jamp.check_numerics(fn))(x)[1].first
    assert (first.operation, first.scope, first.iteration) == (operation, scope, iteration)
    found = jamp.first_nonfinite(fn, x, policy="O0")
    assert (found.operation, found.scope) == (operation, scope)
    assert first.infinities == found.infinities or iteration is not None


def softmax(params, mask):
    with jax.named_scope("attention"):
        return jax.nn.softmax(params["scores"] * 2 + mask)


def test_infinities_that_came_in_are_not_blamed_on_an_operation():
    run = jax.jit(jamp.check_numerics(softmax))
    _, numerics = run({"scores": jnp.float32([1, jnp.inf])}, jnp.zeros(2))
    found = numerics.first
    assert not numerics.ok and (found.operation, found.infinities) == ("argument args[0]['scores']", 1)
    assert (found.nan_made_by.operation, found.nan_made_by.scope) == ("sub", "attention")
    assert "argument args[0]['scores']: 1 inf in float32; turned into NaN by sub, attention" in str(numerics)
    # A mask of infinities may be meant, and makes NaN only where it masks a whole row.
    assert run({"scores": jnp.ones(2)}, jnp.float32([0, -jnp.inf]))[1].ok
    assert run({"scores": jnp.ones(2)}, jnp.full(2, -jnp.inf))[1].first.operation == "argument args[1]"
    _, numerics = run({"scores": jnp.float32([jnp.nan, 1])}, jnp.zeros(2))
    assert numerics.ok and "argument args[0]['scores']: 1 nan" in str(numerics)


def test_what_an_argument_does_not_reach_is_not_blamed_on_it():
    def step(best, x):  # The best loss so far is infinite at first, as it is meant.
        def one(c, y):
            return (jnp.minimum(c[0], y), c[1] * 2), None

        (best, doubled), _ = lax.scan(one, (best, jnp.exp(x)), jnp.arange(3.0))
        return best, doubled - doubled

    run = jax.jit(jamp.check_numerics(step))
    assert run(jnp.float32(jnp.inf), jnp.float32(1))[1].ok
    assert run(jnp.float32(jnp.inf), jnp.float32(100))[1].first.operation == "exp"
    assert run(jnp.float32(0), jnp.float32(jnp.inf))[1].first.operation == "argument args[1]"


def test_steps_in_a_scan_name_the_first_bad_one():
    checked = jamp.check_numerics(lambda c, x: (c, jnp.sqrt(c - x)))

    def steps(c, xs):
        def one(c, x):
            (c, _), numerics = checked(c, x)
            return c, numerics

        return lax.scan(one, c, xs)[1]

    good, bad = (jax.jit(steps)(jnp.float32(c), jnp.arange(6.0)) for c in (9, 3.5))
    assert good.ok and good.first is None and str(good) == "all is finite in 6 steps"
    assert not bad and (bad.first.operation, bad.first.step, bad.first.nans) == ("sqrt", 4, 1)
    assert "in step 4 of 6" in str(bad) and len(bad.operations) == 1
    batched = jax.jit(jax.vmap(steps, (0, None)))(jnp.float32([9, 2.5]), jnp.arange(6.0))
    assert batched.first.step == (1, 3) and "step (1, 3) of 2, 6" in str(batched)


def trains_in_a_loop(hides):
    def steps(x):
        def one(c, i):
            with jax.named_scope("root"):
                g = jnp.sqrt(c - i)
            return jnp.where(jnp.isfinite(g).all(), c, c if hides else g), None

        return lax.scan(one, x, jnp.arange(5.0))[0]

    return steps


@pytest.mark.parametrize("hides, bad", [(True, [3, 4]), (False, [3])])
def test_each_bad_iteration_is_dumped_once_with_its_number(tmp_path, hides, bad):
    run = jax.jit(jamp.check_numerics(trains_in_a_loop(hides), mode="dump", folder=tmp_path))
    jax.block_until_ready(run(jnp.float32([2.5])))
    jax.effects_barrier()
    rows = [row for path in sorted(tmp_path.glob("*.json")) for row in json.loads(path.read_text())]
    assert [(row["operation"], row["iteration"]) for row in rows] == [("sqrt", i) for i in bad]


def test_abort_names_the_iteration():
    run = jax.jit(jamp.check_numerics(trains_in_a_loop(True), mode="abort"))
    with pytest.raises(Exception, match=r"sqrt, root, .*iteration 3"):
        jax.block_until_ready(run(jnp.float32([2.5])))
        jax.effects_barrier()


def test_branches():
    @jamp.check_numerics
    def branch(i, x):
        return lax.switch(i, [jnp.log, jnp.sqrt, lambda x: jnp.where(jnp.isfinite(1 / x), x, 0)], x)

    found = [jax.jit(branch)(i, jnp.float32(x))[1] for i, x in ((0, -1), (1, -1), (2, 0), (2, 1))]
    assert [n.first and n.first.operation for n in found] == ["log", "sqrt", "div", None]


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, hides):
    def body(x, w):
        with jax.named_scope("head"):
            y = jnp.log(x) @ w
        y = lax.scan(lambda c, _: (c * 2, None), y, None, length=2)[0]
        g = lax.psum(y, "d")
        return jnp.where(jnp.isfinite(g).all(), g, 0) if hides else g

    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    f = jax.shard_map(body, mesh=mesh, in_specs=(P("d"), P()), out_specs=P(), check_vma=check_vma)
    out, numerics = jax.jit(jamp.check_numerics(f))(BAD, jnp.ones((2, 2)))
    assert jnp.isfinite(out).all() == hides
    assert made(numerics)[0] == ("log", "head", 1, 1)
    if not hides:
        found = jamp.first_nonfinite(f, BAD, jnp.ones((2, 2)), policy="O3:float16")
        assert (found.operation, found.scope, found.infinities, found.nans, found.size) == ("log", "head", 1, 1, 4)
        big = jamp.first_nonfinite(f, BAD + 2, jnp.full((2, 2), 6e4), policy="O3:float16")
        assert big.operation == "dot_general" and big.scope == "head"


def test_pmap():
    f = jax.pmap(lambda x: lax.psum(jnp.log(x), "i"), axis_name="i", devices=jax.devices()[:2])
    assert made(jax.jit(jamp.check_numerics(f))(BAD)[1]) == [("log", "", 1, 1)]
    assert jamp.first_nonfinite(f, BAD).operation == "log"


def test_inside_of_a_gradient_it_changes_nothing():
    checked = jamp.check_numerics(log_in_scope)
    grads, numerics = jax.jit(jax.grad(checked, has_aux=True))(jnp.float32([1, 2]))
    np.testing.assert_array_equal(grads, jax.jit(jax.grad(log_in_scope))(jnp.float32([1, 2])))
    assert numerics.ok
    assert jax.jit(jax.grad(checked, has_aux=True))(-jnp.ones(2))[1].first.operation == "log"


def test_magnitudes():
    def model(w, x):
        with jax.named_scope("product"):
            h = x @ w
        with jax.named_scope("after"):
            return lax.scan(lambda c, _: (c * 4, (h @ w * c).sum()), 1.0, None, length=3)

    run = jax.jit(jamp.check_numerics(model, mode="largest"))
    _, numerics = run(jnp.full((2, 2), 3.0), jnp.float32([[-2, 1], [0, 0]]))
    sizes = {(op.operation, op.scope): op.largest for op in numerics.operations}
    assert numerics.ok and sizes["dot_general", "product"] == 3 and sizes["dot_general", "after"] == 18


def halves_itself(w, x):
    """3e4 in float16, of 65504."""
    return jnp.tanh(x @ w * 1e-4) @ w


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["cast_fn", "jit", "checkpoint"])
def test_magnitudes_in_a_cast_function(wrap, level):
    args = jnp.eye(4), jnp.full((2, 4), 3e4)
    cast = wrap(jamp.cast_fn(halves_itself, f"{level}:float16"))
    out, numerics = jax.jit(jamp.check_numerics(cast, mode="largest"))(*args)
    assert ("dot_general", "float16", 3e4) in {(op.operation, op.dtype, op.largest) for op in numerics.operations}
    np.testing.assert_array_equal(out, jax.jit(cast)(*args))
    assert jamp.check_numerics(cast)(*args)[1].operations == ()


def test_magnitudes_in_a_gradient_change_neither_it_nor_what_is_kept():
    args = jnp.eye(4), jnp.full((2, 4), 3e4)
    cast = jamp.cast_fn(halves_itself, "O2:float16")

    def loss(fn):
        def scalar(w, x):
            out, *numerics = fn(w, x)
            return (out**2).sum(), numerics

        return jax.grad(scalar, has_aux=True)

    plain, watched = loss(lambda *args: (cast(*args),)), loss(jamp.check_numerics(cast, mode="largest"))
    np.testing.assert_array_equal(jax.jit(watched)(*args)[0], jax.jit(plain)(*args)[0])
    counts = [len(find(trace(fn, *args), "checkpoint", "remat2")) for fn in (plain, watched)]
    assert counts[0] == counts[1] > 0
    (numerics,) = jax.jit(watched)(*args)[1]
    assert max(op.largest for op in numerics.operations) == 3e4


def test_abort_raises():
    run = jax.jit(jamp.check_numerics(log_in_scope, mode="abort"))
    assert run(jnp.ones(2))[1].ok
    with pytest.raises(Exception, match="log, head"):
        jax.block_until_ready(run(BAD))
        jax.effects_barrier()


def test_dump_writes_what_was_seen(tmp_path):
    folder = tmp_path / "a"
    run = jax.jit(jamp.check_numerics(lambda x: log_in_scope(x).astype(jnp.bfloat16), mode="dump", folder=folder))
    for x in (jnp.ones(2), BAD, BAD):
        jax.block_until_ready(run(x))
    jax.effects_barrier()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        f"0000{i}.{e}" for i in (0, 1) for e in ("json", "npz")
    ]
    (row,) = json.loads((folder / "00000.json").read_text())
    assert (row["operation"], row["scope"], row["nans"]) == ("log", "head", 1)
    assert np.isnan(np.load(folder / "00001.npz")["result 0"])


@pytest.mark.parametrize(
    "wrap", [lambda f: jamp.check_numerics(checkify.checkify(f)), lambda f: checkify.checkify(jamp.check_numerics(f))]
)
def test_with_checkify(wrap):
    def checked(x):
        checkify.check((x > 0).all(), "not positive")
        return log_in_scope(x)

    leaves = jax.tree.leaves(jax.jit(wrap(checked))(-jnp.ones(2)), is_leaf=lambda x: isinstance(x, jamp.Numerics))
    (numerics,) = [leaf for leaf in leaves if isinstance(leaf, jamp.Numerics)]
    assert numerics.first.operation == "log"
    assert jamp.first_nonfinite(checked, -jnp.ones(2)).operation == "log"


def test_checks_of_solvers_do_not_keep_first_nonfinite_from_its_answer():
    eqx = pytest.importorskip("equinox")

    def solve(x, steps):
        def one(c):
            new = jnp.sqrt(c[1] - 1)
            return c[0] + 1, jnp.where(jnp.isfinite(new).all(), new, c[1])  # A step that fails is made again.

        taken, x = lax.while_loop(lambda c: (c[0] < steps) & (c[1] > -5).all(), one, (0, x))
        return eqx.error_if(x, taken == steps, "too many steps")

    found = jamp.first_nonfinite(lambda x: solve(x, 4), jnp.float32([3]), policy="O0")
    assert found.operation == "sqrt" and found.iterations == (2,)
    assert jamp.first_nonfinite(lambda x: solve(x, 1), jnp.float32([3]), policy="O0") is None


def test_refused():
    with pytest.raises(TypeError, match="takes a function first"):
        jamp.check_numerics(3)
    with pytest.raises(ValueError, match="Did you mean 'largest'"):
        jamp.check_numerics(log_in_scope, mode="larges")
    with pytest.raises(ValueError, match="go together"):
        jamp.check_numerics(log_in_scope, mode="dump")
    with pytest.raises(ValueError, match="its scopes are head, loss"):
        jax.jit(jamp.check_numerics(log_in_scope, "hed"))(BAD)
