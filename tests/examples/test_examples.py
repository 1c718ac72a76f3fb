"""Every example runs for a few steps; what it promises is checked where a few steps can tell."""

import importlib
import os
import sys
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import jamp

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def quick_compilation():
    """Compiles without most optimizations: the programs are large, and each compiled step runs a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def example(monkeypatch):
    """Imports an example as `python examples/name.py` would, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == EXAMPLES:
            del sys.modules[name]


@pytest.fixture
def shallow(example, monkeypatch):
    """Makes every ResNet one block a stage, which compiles in a quarter of the time."""
    monkeypatch.setattr(example("resnet"), "BLOCKS", dict.fromkeys((18, 34, 50), (1, 1, 1, 1)))


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", ["conv", "mlp"])
def test_digits(example, tmp_path, capsys, model):
    digits = example("digits")
    table, picture = tmp_path / "new" / "table.md", tmp_path / "new" / "picture.png"
    argv = ["--model", model, "--policy", "O2:float16", "--epochs", "4", "--out", str(picture), "--table", str(table)]
    full, half = digits.main(argv)
    assert (full.policy.level, half.policy.level, half.dtype) == ("O0", "O2", "float16")
    assert (full.half_share, half.half_share) == (0, 1)
    assert half.residual_bytes < full.residual_bytes
    assert full.accuracy > 0.85 and abs(half.accuracy - full.accuracy) < 0.01
    np.testing.assert_allclose(half.losses, full.losses, rtol=0.1)
    assert set(half.scales) == {2.0**16, 2.0**17}, "56 steps, and a period of 50"
    assert "float16" in capsys.readouterr().out and "float16" in table.read_text() and is_png(picture)


@pytest.mark.parametrize(
    ("argv", "accepted"),
    [
        (["--policy", "O4"], "O0, OD, O1, O2, O3 or auto"),
        (["--model", "transformer"], "'conv', 'mlp'"),
        (["--epochs", "0"], "at least 1"),
        (["--epochs", "many"], "at least 1"),
        (["--seed", "-1"], "from 0 to 2**32 - 1"),
        (["--out", "digits.txt"], "ends in .png"),
        (["--out", "README.md/digits.png"], "cannot make the folder"),
    ],
)
def test_a_wrong_value_gets_one_line_and_code_2(example, capsys, monkeypatch, argv, accepted):
    monkeypatch.chdir(EXAMPLES.parent)
    with pytest.raises(SystemExit) as exit_info:
        example("digits").main(argv)
    message = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message.count("\n") == 1 and accepted in message and argv[0] in message


def test_paddle_simplenet(example, capsys):
    results = example("paddle_simplenet").main(["--size", "64", "--steps", "10"])
    printed = capsys.readouterr().out
    for line in ("Default time:", "AMP time in O1 mode:", "AMP time in O2 mode:", "total time = "):
        assert line in printed
    losses = [loss for _, loss in results.values()]
    # The expected loss of Glorot weights and random labels is 1.25; the tutorial ends at 1.24 too.
    np.testing.assert_allclose(losses, 1.25, rtol=0.05)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-3)


@pytest.mark.nightly
def test_paddle_o2_trains_float16_parameters_with_float32_masters(example):
    simplenet = example("paddle_simplenet")
    params, states, half = [], [], []
    for variant in simplenet.variants():
        params.append(simplenet.init_params(variant, 8))
        states.append(variant.tx.init(params[-1]))
        report = jamp.report(simplenet.make_step(variant), params[-1], states[-1], *jnp.ones((2, 4, 8)))
        half.append(report.forward.share)
    assert [p[0]["w"].dtype.name for p in params] == ["float32", "float32", "float16", "float32"]
    assert half == [0, 1, 1, 1], "the share of the products of forward and backward pass"
    assert states[2].inner_state.masters[0]["w"].dtype == jnp.float32
    assert states[2].loss_scale.loss_scale == 1024


@pytest.mark.nightly  # It trains.
def test_mindspore_digits(example):
    losses = example("mindspore_digits").main(["--steps", "8"])
    assert len(losses) == 5
    for name, curve in losses.items():
        np.testing.assert_allclose(curve, losses["NetworkFP16Manual"], rtol=1e-3, err_msg=name)
        assert curve[-1] < curve[0]


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_resnets_have_the_published_number_of_parameters(example, depth, parameters):
    resnet = example("resnet")
    params, _ = jax.eval_shape(lambda: resnet.init(resnet.ResNet(depth), 0, 224))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameters


SMALL = ["--size", "32", "--width", "4"]


@pytest.mark.nightly
@pytest.mark.usefixtures("shallow")
def test_mindspore_resnet34(example):
    losses = example("mindspore_resnet34").main([*SMALL, "--batch", "4", "--steps", "3"])
    assert losses[-1] < losses[0]


@pytest.mark.nightly
@pytest.mark.usefixtures("shallow")
def test_mxnet_benchmark(example, capsys):
    losses = example("mxnet_resnet50").main(["benchmark", *SMALL, "--batch", "4", "--steps", "2"])
    assert list(losses) == ["O0", "O2:float16"] and capsys.readouterr().out.count("images/s") == 2
    assert losses["O2:float16"][0] == pytest.approx(losses["O0"][0], rel=1e-2)


@pytest.mark.nightly
@pytest.mark.usefixtures("shallow")
def test_mxnet_finetunes_a_float32_checkpoint(example):
    losses = example("mxnet_resnet50").main(["finetune", *SMALL, "--batch", "4", "--steps", "3"])
    assert all(np.isfinite(losses["float32"]))
    assert losses["float16"][-1] < losses["float16"][0]
    assert losses["float16"][0] == pytest.approx(np.log(101), rel=0.3), "a new head with 101 classes"


@pytest.mark.nightly
@pytest.mark.usefixtures("shallow")
def test_mxnet_recipe_runs_on_a_folder_of_images(example, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "notes.txt").write_text("not an image")
        for i in range(3):
            pixels = rng.integers(256, size=(40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    weights = tmp_path / "weights.msgpack"
    argv = [str(tmp_path), *SMALL, "--batch", "4", "--epochs", "2", "--save", str(weights)]
    means = example("mxnet_imagenet").main(argv)
    assert len(means) == 2 and np.isfinite(means).all()
    assert capsys.readouterr().out.count("validation top-1") == 2
    params, stats = flax.serialization.msgpack_restore(weights.read_bytes()).values()
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, stats))} == {"float32"}


def test_mxnet_recipe_refuses_a_folder_without_images(example, tmp_path, capsys):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    for folder, complaint in ((tmp_path, "more than the 0 images"), (tmp_path / "train", "a subfolder train")):
        with pytest.raises(SystemExit):
            example("mxnet_imagenet").main([str(folder)])
        assert complaint in capsys.readouterr().err


def test_mxnet_recipe_is_the_tutorials(example):
    recipe = example("mxnet_imagenet").Recipe()
    steps_per_epoch = 1_281_167 // recipe.batch
    state = recipe.optimizer(steps_per_epoch).init({"w": jnp.ones(2, jnp.float16)})
    assert (recipe.epochs, recipe.batch, steps_per_epoch) == (90, 1024, 1251)
    assert state.loss_scale.loss_scale == 128
    assert state.inner_state.masters["w"].dtype == jnp.float32


@pytest.mark.nightly
@pytest.mark.usefixtures("shallow")
def test_megengine_resnet18(example):
    dtypes, losses = example("megengine_resnet18").main([*SMALL, "--steps", "2"])
    assert dtypes == {"transform": jnp.float16, "decorator": jnp.float16, "switched off": jnp.float32}
    assert losses["automatic"] == losses["manual"]
    assert losses["manual"][-1] < losses["manual"][0]


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["lstm", "gpt"])
def test_language_models(example, tmp_path, monkeypatch, model):
    language_models = example("language_models")
    monkeypatch.setattr(language_models, "POLICIES", ("O0", "O2:float16"))
    argv = ["--model", model, "--steps", "8", "--size", "16", "--out", str(tmp_path / "curves.png")]
    results = language_models.main(argv)
    assert results[model, "O2:float16"] == pytest.approx(results[model, "O0"], rel=0.01)
    assert results[model, "O0"] < np.log(256), "better than chance"
    assert is_png(tmp_path / "curves.png")


@pytest.mark.nightly
def test_gan_adapts_three_scales(example, tmp_path):
    state = example("gan").main(["--steps", "5", "--out", str(tmp_path / "gan.png")])
    assert len(state.scales) == 3 and all(int(scale.counter) <= 5 for scale in state.scales)
    assert state.generator_opt[0].count == state.discriminator_opt[0].count == 5
    assert is_png(tmp_path / "gan.png")


@pytest.mark.nightly
def test_pmap_haiku_skips_together(example, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # The example adds to it.
    picture = tmp_path / "pmap.png"
    state, losses = example("pmap_haiku").main(["--steps", "6", "--devices", "4", "--out", str(picture)])
    assert "4 devices; their parameters differ by 0" in capsys.readouterr().out
    assert [bool(np.isfinite(loss)) for loss in losses] == [True, True, True, False, True, True]
    metrics = jamp.metrics(state.opt_state)
    assert metrics["skipped"].tolist() == [1] * 4 and metrics["loss_scale"].tolist() == [2.0**14] * 4
    assert is_png(picture)


def test_gradient_penalty(example):
    full = example("gradient_penalty").main(["--policy", "O0", "--steps", "20"])["O0"]
    half = example("gradient_penalty").main(["--policy", "O2:float16", "--steps", "20"])["O2:float16"]
    np.testing.assert_allclose(half, full, rtol=0.02)
    assert half[-1] < half[0]
