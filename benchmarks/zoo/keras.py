"""Keras models through ``stateless_call``; native precision is the dtype policy ``mixed_bfloat16``."""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np

from benchmarks.models import Model, first_class, normal, tokens
from benchmarks.zoo._entries import Zoo

ZOO = Zoo("keras")


def _model(create: Callable[[], Any], dtype: Any, batch: jax.Array) -> Model:
    """Creates a model under its dtype policy and puts both that and the seed back."""
    before = keras.config.dtype_policy()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32" if dtype is None else f"mixed_{np.dtype(dtype).name}")
    try:
        model = create()
    finally:
        keras.config.set_dtype_policy(before)
    params = [variable.value for variable in model.trainable_variables]
    state = [variable.value for variable in model.non_trainable_variables]

    def apply(params: Any, state: Any, batch: jax.Array) -> Any:
        return model.stateless_call(params, state, batch, training=True)

    return Model(apply, params, (state, batch), first_class)


def _application(name: str, dtype: Any, **options: Any) -> Model:
    def create() -> Any:
        build = getattr(keras.applications, name)
        return build(weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None, **options)

    return _model(create, dtype, normal(4, 32, 32, 3))


@ZOO.add()
def resnet50(dtype: Any) -> Model:
    """``keras.applications.ResNet50``."""
    return _application("ResNet50", dtype)


@ZOO.add()
def mobilenet_v2(dtype: Any) -> Model:
    """``keras.applications.MobileNetV2``: depthwise convolutions, ReLU6."""
    return _application("MobileNetV2", dtype, alpha=0.5)


@ZOO.add()
def text_classifier(dtype: Any) -> Model:
    """Attention, LSTM and dropout in one functional model."""

    def create() -> Any:
        ids = keras.Input((32,), dtype="int32")
        x = keras.layers.Embedding(256, 64)(ids)
        x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(4, 16)(x, x))
        x = keras.layers.Dropout(0.1)(x)
        x = keras.layers.Bidirectional(keras.layers.LSTM(32))(x)
        return keras.Model(ids, keras.layers.Dense(10)(x))

    return _model(create, dtype, tokens(8, 32, 256))
