"""A graph network without a library of graphs: edges gather their nodes, nodes sum their edges, in a Python loop.

Graphs of a batch are one padded graph, as jraph has them; padded nodes do not count in the loss.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .train_step import TrainStep, of

SOURCE = "MeshGraphNets (Pfaff et al. 2021) on 16 of its meshes of flow past a cylinder, plain functions and optax"


class Graph(NamedTuple):
    """**Fields:** `nodes` f[N, 11]: velocity, and which of nine kinds; `edges` f[E, 3]: displacement and distance;
    `senders`, `receivers` i[E]; `target` f[N, 2]: acceleration; `real` b[N]: False of padding."""

    nodes: jax.Array
    edges: jax.Array
    senders: jax.Array
    receivers: jax.Array
    target: jax.Array
    real: jax.Array


def mlp_params(key, n_in, width, n_out, norm=True):
    keys = jax.random.split(key, 3)
    sizes = [(n_in, width), (width, width), (width, n_out)]
    layers = [
        {"w": jax.random.normal(k, size) * size[0] ** -0.5, "b": jnp.zeros(size[1])}
        for k, size in zip(keys, sizes, strict=True)
    ]
    return {"layers": layers, "norm": {"scale": jnp.ones(n_out), "bias": jnp.zeros(n_out)} if norm else None}


def mlp(p, x):
    *hidden, last = p["layers"]
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    x = x @ last["w"] + last["b"]
    return x if p["norm"] is None else jax.nn.standardize(x) * p["norm"]["scale"] + p["norm"]["bias"]


def init_params(key, width, steps):
    node_key, edge_key, out_key, *keys = jax.random.split(key, 3 + steps)
    blocks = [
        {
            "edge": mlp_params(jax.random.fold_in(k, 0), 3 * width, width, width),
            "node": mlp_params(jax.random.fold_in(k, 1), 2 * width, width, width),
        }
        for k in keys
    ]
    return {
        "node": mlp_params(node_key, 11, width, width),
        "edge": mlp_params(edge_key, 3, width, width),
        "blocks": blocks,
        "out": mlp_params(out_key, width, width, 2, norm=False),
    }


def forward(params, graph, velocity_noise):
    velocity = graph.nodes[:, :2] + velocity_noise
    nodes = mlp(params["node"], jnp.concatenate([velocity, graph.nodes[:, 2:]], axis=-1))
    edges = mlp(params["edge"], graph.edges)
    for p in params["blocks"]:
        message = jnp.concatenate([edges, nodes[graph.senders], nodes[graph.receivers]], axis=-1)
        edges = edges + mlp(p["edge"], message)
        received = jax.ops.segment_sum(edges, graph.receivers, num_segments=nodes.shape[0])
        nodes = nodes + mlp(p["node"], jnp.concatenate([nodes, received], axis=-1))
    return mlp(params["out"], nodes)


def loss_fn(params, graph, noise):
    error = jnp.square(forward(params, graph, noise) - (graph.target - noise)).sum(-1)
    return jnp.where(graph.real, error, 0.0).sum() / graph.real.sum()


def train_step(state, graph, tx, noise):
    params, opt_state, key = state
    key, now = jax.random.split(key)
    drawn = noise * jax.random.normal(now, graph.target.shape)
    loss, grads = jax.value_and_grad(loss_fn)(params, graph, drawn)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss}


def mesh_graph_net(tiny: bool = False) -> TrainStep:
    nodes, edges, width, steps = (64, 192, 16, 3) if tiny else (16 * 2048, 16 * 12_288, 128, 15)
    tx = optax.adam(optax.exponential_decay(3e-3 if tiny else 1e-4, 1_000_000, 0.1))

    def make(seed):
        keys = iter(jax.random.split(jax.random.key(seed), 8))
        kind = jax.nn.one_hot(jax.random.randint(next(keys), (nodes,), 0, 9), 9)
        real = nodes - nodes // 8
        graph = Graph(
            nodes=jnp.concatenate([jax.random.normal(next(keys), (nodes, 2)), kind], axis=-1),
            edges=jax.random.normal(next(keys), (edges, 3)),
            senders=jax.random.randint(next(keys), (edges,), 0, real, jnp.int32),
            receivers=jax.random.randint(next(keys), (edges,), 0, real, jnp.int32),
            target=jax.random.normal(next(keys), (nodes, 2)),
            real=jnp.arange(nodes) < real,
        )
        params = init_params(next(keys), width, steps)
        return (params, tx.init(params), next(keys)), graph

    return of(functools.partial(train_step, tx=tx, noise=0.02), make, SOURCE)
