"""An LSTM and a GPT-style language model on real text, in float32, in float16 with loss scaling and in bfloat16.

The text is the Python standard library's own source code, byte by byte, because every machine that runs this has it.
The goal is the same loss: the two half-precision runs are to end within 1 % of float32's on text that was held out.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import matplotlib
import numpy as np
import optax
from _shared import Parser, line_style, png_path, positive_int, scaler_for, seed, smooth, source_text
from rich.progress import Progress

import jamp

matplotlib.use("Agg")  # A picture for a file needs no display.
import matplotlib.pyplot as plt

POLICIES = ("O0", "O1:float16", "O2:float16", "O1:bfloat16", "O2:bfloat16")
VOCABULARY = 256  # bytes
LENGTH = 64
BATCH = 32


class LSTM(nn.Module):
    """A one-layer LSTM that predicts the next byte."""

    size: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, self.size)(tokens)
        x = nn.RNN(nn.OptimizedLSTMCell(self.size))(x)
        return nn.Dense(VOCABULARY)(x)


class Block(nn.Module):
    """Pre-norm self-attention and MLP, each around a residual connection."""

    size: int
    heads: int = 4

    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(self.heads, deterministic=True)(nn.LayerNorm()(x), mask=mask)
        y = nn.gelu(nn.Dense(4 * self.size)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.size)(y)


class GPT(nn.Module):
    """A decoder-only transformer that predicts the next byte."""

    size: int
    layers: int = 2

    @nn.compact
    def __call__(self, tokens):
        positions = self.param("positions", nn.initializers.normal(0.02), (LENGTH, self.size))
        x = nn.Embed(VOCABULARY, self.size)(tokens) + positions[: tokens.shape[1]]
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = Block(self.size)(x, mask)
        return nn.Dense(VOCABULARY, use_bias=False, name="lm_head")(nn.LayerNorm()(x))


MODELS = {"lstm": LSTM, "gpt": GPT}


def make_loss_fn(model: nn.Module, policy: str) -> Callable:
    apply_fn = jamp.cast_fn(model.apply, policy=policy)

    def loss_fn(params, tokens):
        """Mean cross entropy in nats per byte of `tokens`, shape (batch, LENGTH + 1)."""
        logits = apply_fn(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


def make_step(loss_fn: Callable, tx: optax.GradientTransformation) -> Callable:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, tokens):
        loss, grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def sample(text: np.ndarray, rng: np.random.Generator, batch: int = BATCH) -> np.ndarray:
    """Returns random pieces of the text, int32 of shape (batch, LENGTH + 1)."""
    starts = rng.integers(len(text) - LENGTH - 1, size=batch)
    return text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns the text to learn from, and pieces of other text to be tested on."""
    text = source_text(2_000_000)
    return text[:-100_000], sample(text[-100_000:], np.random.default_rng(1), batch=256)


def train(
    model: nn.Module,
    spec: str,
    text: np.ndarray,
    held_out: np.ndarray,
    steps: int,
    seed: int,
    tick: Callable,
    batch: int = BATCH,
) -> tuple[list[float], float]:
    """Returns the loss of every step, and the loss on held-out text after the last."""
    policy = jamp.get_policy(spec)
    scaler = scaler_for(policy, jamp.DynamicLossScale(2.0**15, period=200))
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(3e-3, steps)))
    tx = jamp.mixed_precision(adam, policy, loss_scale=scaler)
    rng = np.random.default_rng(seed)
    params = policy.cast_to_param(jax.jit(model.init)(jax.random.key(seed), sample(text, rng, batch)[:, :-1]))
    opt_state = tx.init(params)
    loss_fn = make_loss_fn(model, spec)
    step = make_step(loss_fn, tx)
    losses = []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state, sample(text, rng, batch))
        losses.append(float(loss))
        tick()
    return losses, float(jax.jit(loss_fn)(params, held_out))


def plot(curves: dict[tuple[str, str], list[float]], path) -> None:
    """Draws the loss curves, and under them how far they are from float32's; a column a model."""
    models = list(dict.fromkeys(model for model, _ in curves))
    figure, axes = plt.subplots(2, len(models), figsize=(6 * len(models), 7), sharex=True, squeeze=False)
    for (upper, lower), model in zip(axes.T, models, strict=True):
        reference = np.array(curves[model, "O0"])
        for spec in (spec for name, spec in curves if name == model):
            losses, style = np.array(curves[model, spec]), line_style(jamp.get_policy(spec))
            upper.plot(smooth(losses), label=spec, **style)
            lower.plot(smooth(100 * (losses / reference - 1)), label=spec, **style)
        upper.set(title=f"{model}: Python source, byte level", ylabel="loss in nats per byte, smoothed")
        lower.set(xlabel="step", ylabel="difference from float32 in %, smoothed", ylim=(-1.1, 1.1))
        upper.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[tuple[str, str], float]:
    parser = Parser(prog="language_models.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("all", *MODELS), default="all")
    parser.add_argument("--steps", type=positive_int, default=600)
    parser.add_argument("--size", type=positive_int, default=128, help="width of the model, a multiple of 4")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--out", type=png_path, default="out/language_models.png")
    args = parser.parse_args(argv)
    if args.size % Block.heads:
        parser.error(f"argument --size: expected a multiple of {Block.heads}, got {args.size}")
    text, held_out = load_text()
    names = MODELS if args.model == "all" else (args.model,)
    curves, results = {}, {}
    with Progress() as progress:
        task = progress.add_task("", total=len(names) * len(POLICIES) * args.steps)
        for name in names:
            for spec in POLICIES:
                progress.update(task, description=f"{name} {spec}")
                tick = functools.partial(progress.advance, task)
                model = MODELS[name](args.size)
                curves[name, spec], results[name, spec] = train(
                    model, spec, text, held_out, args.steps, args.seed, tick
                )
    for (name, spec), loss in results.items():
        difference = 100 * (loss / results[name, "O0"] - 1)
        print(f"{name:5s} {spec:12s} held-out loss {loss:.4f} nats per byte ({difference:+.2f} % of float32's)")
    plot(curves, args.out)
    return results


if __name__ == "__main__":
    main()
