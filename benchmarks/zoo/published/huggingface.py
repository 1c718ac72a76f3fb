"""The Flax models of Hugging Face's transformers (4.x, the last that has them), each with its own loss.

Their own mixed precision is `dtype=`, which all of them take; parameters stay float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import transformers

from benchmarks.models import Model, first_class, initial, mean_square, next_token, normal, tokens
from benchmarks.zoo._entries import Entry, Zoo

ZOO = Zoo("hf")
WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH, BATCH = 64, 2, 4, 128, 32, 4

_ENCODER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
_DECODER: dict[str, Any] = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCABULARY}
_BART: dict[str, Any] = {
    "d_model": WIDTH,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 4 * WIDTH for side in ("encoder", "decoder")},
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5: dict[str, Any] = {
    "d_model": WIDTH, "d_kv": 16, "d_ff": 4 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS,
    "vocab_size": VOCABULARY, "decoder_start_token_id": 0,
}  # fmt: skip
_VISION: dict[str, Any] = {
    **{key: _ENCODER[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    "image_size": 32,
    "patch_size": 8,
}
_LLAMA: dict[str, Any] = {**_ENCODER, "num_key_value_heads": 2}


def _language(logits: Any, *inputs: Any) -> jax.Array:
    """Next tokens; of masked models too, whose logits have the same shape."""
    return next_token(logits, *inputs)


def _add(
    name: str, config: dict[str, Any], model: str, inputs: Callable[[], tuple[Any, ...]], loss: Callable[..., Any]
) -> None:
    """Registers a model: the name of its configuration class, its changes, and its Flax class."""

    def build(dtype: Any) -> Model:
        made = getattr(transformers, f"{name}Config")(**config)
        network = getattr(transformers, f"Flax{name}{model}")(made, dtype=dtype or jnp.float32, _do_init=False)
        params = initial(lambda: network.init_weights(jax.random.key(0), network.input_shape), dtype)

        def apply(params: Any, *batch: Any) -> Any:
            out = network(*batch, params=params)
            for field in ("logits", "logits_per_image", "last_hidden_state"):
                if getattr(out, field, None) is not None:
                    return getattr(out, field)
            raise TypeError(f"Expected logits or hidden states, got {type(out).__name__}.")

        return Model(apply, params, inputs(), loss)

    ZOO.entries.append(Entry(f"hf/{name.lower()}", build, native=True))


def _ids() -> tuple[Any, ...]:
    return (tokens(BATCH, LENGTH, VOCABULARY),)


def _padded_ids() -> tuple[Any, ...]:
    """Tokens padded on the left, as in batches for generation: rows of the mask are empty."""
    mask = np.ones((BATCH, LENGTH), np.int32)
    mask[0, : LENGTH // 2] = 0
    return tokens(BATCH, LENGTH, VOCABULARY), jnp.asarray(mask)


def _pairs() -> tuple[Any, ...]:
    """Tokens of the encoder, and those of the decoder for the loss."""
    ids = tokens(BATCH, LENGTH, VOCABULARY)
    return ids, jnp.ones_like(ids), ids


def _pixels() -> tuple[Any, ...]:
    return (normal(BATCH, 3, 32, 32),)


def _causal(logits: Any, *inputs: Any) -> jax.Array:
    return next_token(logits, inputs[0])


for _name in ("Bert", "Roberta", "Electra", "RoFormer", "XLMRoberta", "RobertaPreLayerNorm"):
    _add(_name, _ENCODER, "ForMaskedLM", _ids, _language)
_add("Albert", {**_ENCODER, "embedding_size": 32}, "ForMaskedLM", _ids, _language)
_add(
    "DistilBert",
    {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 4 * WIDTH, "vocab_size": VOCABULARY},
    "ForMaskedLM",
    _ids,
    _language,
)
_add("BigBird", {**_ENCODER, "attention_type": "original_full"}, "ForMaskedLM", _ids, _language)
_add("GPT2", {**_DECODER, "n_positions": 64}, "LMHeadModel", _padded_ids, _causal)
_add("GPTJ", {**_DECODER, "n_positions": 64, "rotary_dim": 8}, "ForCausalLM", _padded_ids, _causal)
_add(
    "GPTNeo",
    {
        "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]], "window_size": 8,
    },
    "ForCausalLM", _padded_ids, _causal,
)  # fmt: skip
_add("Bloom", _DECODER | {"hidden_size": WIDTH}, "ForCausalLM", _padded_ids, _causal)
_add(
    "OPT",
    {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "ffn_dim": 4 * WIDTH,
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "word_embed_proj_dim": WIDTH,
    },
    "ForCausalLM", _padded_ids, _causal,
)  # fmt: skip
_add(
    "XGLM",
    {
        "d_model": WIDTH, "num_layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 4 * WIDTH,
        "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    },
    "ForCausalLM", _padded_ids, _causal,
)  # fmt: skip
for _name in ("Llama", "Mistral"):
    _add(_name, _LLAMA, "ForCausalLM", _padded_ids, _causal)
_add("Gemma", {**_LLAMA, "head_dim": 16}, "ForCausalLM", _padded_ids, _causal)
for _name in ("Bart", "MBart", "Blenderbot", "Marian", "Pegasus"):
    _add(_name, _BART, "ForConditionalGeneration" if _name != "Marian" else "MTModel", _pairs, _language)
for _name in ("T5", "MT5"):
    _add(_name, _T5, "ForConditionalGeneration", _pairs, _language)
_add("LongT5", {**_T5, "local_radius": 7}, "ForConditionalGeneration", _pairs, _language)
for _name in ("ViT", "Beit", "Dinov2"):
    _add(_name, _VISION, "ForImageClassification", _pixels, first_class)
_add(
    "ResNet",
    {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
    "ForImageClassification",
    _pixels,
    first_class,
)
_add("RegNet", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
     "ForImageClassification", _pixels, first_class)  # fmt: skip
_add(
    "CLIP",
    {
        "text_config": {**_ENCODER, "projection_dim": 32},
        "vision_config": {**_VISION, "projection_dim": 32},
        "projection_dim": 32,
    },
    "Model", lambda: (*_ids(), jnp.moveaxis(_pixels()[0], 1, 1)), first_class,
)  # fmt: skip
_add(
    "Wav2Vec2",
    {
        **_ENCODER, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "do_stable_layer_norm": True,
        "feat_extract_norm": "layer",
    },
    "Model", lambda: (normal(2, 640),), mean_square,
)  # fmt: skip
_add(
    "Whisper",
    {**_BART, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
    "ForConditionalGeneration", lambda: (normal(BATCH, 16, 64), tokens(BATCH, LENGTH, VOCABULARY)), _language,
)  # fmt: skip
