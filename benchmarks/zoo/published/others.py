"""Models of equimo (vision), flowjax (normalizing flows), jraph (graphs) and rlax (losses of agents).

None has a mixed precision of its own: what they are compared with is all of them in half.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flowjax.bijections
import flowjax.distributions
import flowjax.flows
import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import rlax

from benchmarks.models import Model, first_class, mean_square, normal
from benchmarks.zoo._entries import Zoo

try:
    from equimo.vision.models.convnext import ConvNeXt
    from equimo.vision.models.mobilenet import mobilenetv3_small
    from equimo.vision.models.vit import VisionTransformer
except ImportError:  # equimo up to 1.1.
    from equimo.models.convnext import ConvNeXt
    from equimo.models.mobilenet import mobilenetv3_small
    from equimo.models.vit import VisionTransformer

ZOO = Zoo("published")
KEY = jax.random.key(0)


def _module(module: Any, call: Callable[..., Any], inputs: tuple[Any, ...], loss: Any = mean_square) -> Model:
    """An Equinox module whose floating arrays are parameters."""
    params, static = eqx.partition(module, eqx.is_inexact_array)
    return Model(lambda params, *batch: call(eqx.combine(params, static), *batch), params, inputs, loss)


def _classifier(module: Any) -> Model:
    def call(module: Any, images: jax.Array) -> jax.Array:
        return jax.vmap(lambda image: module(image, key=KEY, inference=True))(images)

    return _module(module, call, (normal(2, 3, 64, 64),), first_class)


@ZOO.add(native=False)
def convnext(dtype: Any) -> Model:
    """equimo's ConvNeXt."""
    del dtype
    return _classifier(ConvNeXt(3, depths=[1, 1, 2, 1], dims=[16, 32, 64, 64], num_classes=10, key=KEY))


@ZOO.add(native=False)
def vit(dtype: Any) -> Model:
    """equimo's vision transformer."""
    del dtype
    return _classifier(VisionTransformer(64, 3, 64, 8, num_heads=4, depths=[2], num_classes=10, reg_tokens=2, key=KEY))


@ZOO.add(native=False)
def mobilenet(dtype: Any) -> Model:
    """equimo's MobileNetV3."""
    del dtype
    return _classifier(mobilenetv3_small(in_channels=3, num_classes=10, key=KEY))


def _flow(flow: Any) -> Model:
    def loss(log_densities: jax.Array, *inputs: Any) -> jax.Array:
        del inputs
        return -log_densities.mean()

    return _module(flow, lambda flow, x: flow.log_prob(x), (normal(64, 4),), loss)


@ZOO.add(native=False)
def masked_autoregressive_flow(dtype: Any) -> Model:
    """flowjax's affine autoregressive flow."""
    del dtype
    base = flowjax.distributions.Normal(jnp.zeros(4))
    return _flow(flowjax.flows.masked_autoregressive_flow(KEY, base_dist=base, nn_width=32))


@ZOO.add(native=False)
def coupling_flow(dtype: Any) -> Model:
    """flowjax's coupling flow with rational quadratic splines."""
    del dtype
    base = flowjax.distributions.Normal(jnp.zeros(4))
    spline = flowjax.bijections.RationalQuadraticSpline(knots=8, interval=4)
    return _flow(flowjax.flows.coupling_flow(KEY, base_dist=base, transformer=spline, nn_width=32))


@ZOO.add(native=False)
def planar_flow(dtype: Any) -> Model:
    """flowjax's planar flow."""
    del dtype
    base = flowjax.distributions.Normal(jnp.zeros(4))
    return _flow(flowjax.flows.planar_flow(KEY, base_dist=base, width_size=32, depth=1))


def _graph() -> Any:
    rng = np.random.default_rng(0)
    nodes, edges = 64, 256
    return jraph.GraphsTuple(
        nodes=jnp.asarray(rng.normal(size=(nodes, 16)), jnp.float32),
        edges=jnp.asarray(rng.normal(size=(edges, 8)), jnp.float32),
        senders=jnp.asarray(rng.integers(nodes, size=edges)),
        receivers=jnp.asarray(rng.integers(nodes, size=edges)),
        n_node=jnp.asarray([nodes]),
        n_edge=jnp.asarray([edges]),
        globals=jnp.zeros((1, 4)),
    )


def _on_graphs(make: Callable[[], Callable[[Any], Any]]) -> Model:
    transformed = hk.without_apply_rng(hk.transform(lambda graph: make()(graph).nodes))
    graph = _graph()
    params = jax.jit(transformed.init)(KEY, graph)
    return Model(transformed.apply, params, (graph,))


@ZOO.add(native=False)
def graph_network(dtype: Any) -> Model:
    """jraph's full graph network."""
    del dtype

    def make() -> Any:
        def mlp(name: str) -> Callable[..., jax.Array]:
            net = hk.nets.MLP([32, 16], name=name)
            return lambda *parts: net(jnp.concatenate(parts, -1))

        return jraph.GraphNetwork(mlp("edge"), mlp("node"), mlp("global"))

    return _on_graphs(make)


@ZOO.add(native=False)
def graph_convolution(dtype: Any) -> Model:
    """jraph's graph convolution, twice."""
    del dtype

    def make() -> Any:
        first = jraph.GraphConvolution(hk.nets.MLP([32], activate_final=True), add_self_edges=True)
        second = jraph.GraphConvolution(hk.Linear(8), add_self_edges=True)
        return lambda graph: second(first(graph))

    return _on_graphs(make)


@ZOO.add(native=False)
def graph_attention(dtype: Any) -> Model:
    """jraph's graph attention."""
    del dtype

    def make() -> Any:
        query, logits = hk.Linear(32), hk.Linear(1)
        return jraph.GAT(query, lambda *parts: logits(jax.nn.leaky_relu(jnp.concatenate(parts, -1))), jax.nn.relu)

    return _on_graphs(make)


def _agent(loss: Callable[..., jax.Array]) -> Model:
    """A network of policy and value, and a loss of rlax, which is a part of what is cast."""
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([64, 64, 5])(x)))
    observations = normal(16, 9, 12)
    rng = np.random.default_rng(0)
    batch = (
        observations,
        jnp.asarray(rng.integers(4, size=(16, 8))),
        jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
        jnp.full((16, 8), 0.99, jnp.float32),
    )

    def apply(
        params: Any, observations: jax.Array, actions: jax.Array, rewards: jax.Array, discounts: jax.Array
    ) -> Any:
        out = net.apply(params, observations)
        return jax.vmap(loss)(out[..., :4], out[..., 4], actions, rewards, discounts)

    return Model(apply, jax.jit(net.init)(KEY, observations), batch, lambda losses, *_: losses.mean())


@ZOO.add(native=False)
def vtrace(dtype: Any) -> Model:
    """rlax's V-trace actor-critic loss."""
    del dtype

    def loss(logits: Any, values: Any, actions: Any, rewards: Any, discounts: Any) -> jax.Array:
        ratios = jnp.exp(0.1 * rewards)
        found = rlax.vtrace_td_error_and_advantage(values[:-1], values[1:], rewards, discounts, ratios)
        policy = rlax.policy_gradient_loss(logits[:-1], actions, found.pg_advantage, jnp.ones_like(rewards))
        entropy = rlax.entropy_loss(logits[:-1], jnp.ones_like(rewards))
        return policy + 0.5 * jnp.square(found.errors).mean() + 0.01 * entropy

    return _agent(loss)


@ZOO.add(native=False)
def q_learning(dtype: Any) -> Model:
    """rlax's double Q-learning with a Huber loss."""
    del dtype

    def loss(q: Any, values: Any, actions: Any, rewards: Any, discounts: Any) -> jax.Array:
        del values
        error = jax.vmap(rlax.double_q_learning)(q[:-1], actions, rewards, discounts, q[1:], q[1:])
        return rlax.huber_loss(error).mean()

    return _agent(loss)


@ZOO.add(native=False)
def generalized_advantages(dtype: Any) -> Model:
    """rlax's clipped surrogate loss with truncated generalized advantages, as in PPO."""
    del dtype

    def loss(logits: Any, values: Any, actions: Any, rewards: Any, discounts: Any) -> jax.Array:
        advantages = rlax.truncated_generalized_advantage_estimation(rewards, discounts, 0.95, values)
        log_policy = rlax.batched_index(jax.nn.log_softmax(logits[:-1]), actions)
        ratios = jnp.exp(log_policy - jax.lax.stop_gradient(log_policy) + 0.05 * rewards)
        surrogate = rlax.clipped_surrogate_pg_loss(ratios, advantages, 0.2)
        return surrogate + 0.5 * rlax.l2_loss(values[:-1] - jax.lax.stop_gradient(advantages + values[:-1])).mean()

    return _agent(loss)
