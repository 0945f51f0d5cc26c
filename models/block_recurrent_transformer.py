"""The recurrent layer of "Block-Recurrent Transformers" (Hutchins et al. 2022, arXiv 2203.07852).

A transformer layer is applied along the sequence, a block of `window` tokens and `states` state vectors at a time. In
the vertical direction tokens attend to the window before them and, in parallel, to the states; in the horizontal
direction states attend to themselves and to the tokens of this block and the one before, and gates take the place of
residuals. Keys and values are shared between the directions: four sets of queries, two of keys and values.

Only the state update is sequential. Token projections, attention within the window and, given the states of all
blocks, attention to the states and the feed-forward sublayer are done for all blocks at once.

Where the authors' code differs from their paper, the code that produced the published numbers is followed: RMS norms,
state IDs added after the norm, no bias in z (eq. 1), tanh in z only in the `single` configuration (eq. 4), and what
models/sliding_window.py says of the window.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers.attention import attend, overlapping, query_tile_of, sliding_window_attention
from block_recurrent.layers.axes import constrain, partitioned
from block_recurrent.layers.dropout import tied_dropout
from block_recurrent.layers.feed_forward import FeedForward
from block_recurrent.layers.gates import GATES, gate, gate_parameters
from block_recurrent.layers.norms import l2_normalise, rms_norm
from block_recurrent.layers.parameters import attention_mask, bias_table, kernel, project, project_unit, scale

CONFIGURATIONS = ("dual", "single", "skip")

State = dict[str, jax.Array]


class BlockRecurrentLayer(nn.Module):
    """Vertical and horizontal direction of the recurrent cell; y, state = layer(x, state, start).

    The state holds the recurrent vectors of the current block, the keys and values of the block of tokens before, and,
    of a block that is not finished, how many tokens have come, theirs too, and those of its states.
    """

    heads: int
    head_dim: int
    mlp_dim: int
    window: int
    states: int
    dim: int
    gate: str = "fixed"
    configuration: str = "skip"
    query_tile: int | None = None
    remat_update: bool = False
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        for name, value, known in (("gate", self.gate, GATES), ("configuration", self.configuration, CONFIGURATIONS)):
            if value not in known:
                raise UserError(f"{name} {value!r} is not one of {', '.join(known)}")
        query_tile_of(self.window, self.query_tile)  # a wrong one is told when the layer is built
        super().__post_init__()

    @property
    def block(self) -> int:
        return self.window

    def initial_state(self, batch: int) -> State:
        tokens = (batch, 2 * self.window, self.heads, self.head_dim)
        vectors = (batch, self.states, self.heads, self.head_dim)
        return {
            "keys": jnp.zeros(tokens, self.dtype),
            "values": jnp.zeros(tokens, self.dtype),
            "recurrent": jnp.zeros((batch, self.states, self.dim), self.dtype),
            "state_keys": jnp.zeros(vectors, self.dtype),
            "state_values": jnp.zeros(vectors, self.dtype),
            "position": jnp.zeros((batch,), jnp.int32),
        }

    @nn.compact
    def __call__(self, x: jax.Array, state: State, start: jax.Array) -> tuple[jax.Array, State]:
        n, d = x.shape[1:]
        shape = (self.heads, self.head_dim)
        x = x.astype(self.dtype)
        u = tied_dropout(self, rms_norm(x, scale(self, "attention_norm", d)), self.dropout)
        tokens = {
            "queries": project_unit(self, "queries", u, *shape),
            "cross_queries": project_unit(self, "cross_queries", u, *shape),
            "keys": project_unit(self, "keys", u, *shape),
            "values": project(self, "values", u, *shape),
        }
        cell = {
            "scale": scale(self, "attention_scale", self.heads),
            "cross_scale": scale(self, "cross_scale", self.heads),
            "bias": bias_table(self, "relative_bias", self.heads),
            "keep": attention_mask(self, self.dropout, self.heads, self.window),
            **self.horizontal_parameters(d),
        }
        if n % self.window:
            attended, state = self.token_by_token(cell, tokens, state, start)
        else:
            # A stream fed in odd pieces may stand inside a block here. Training never does, and its backward pass
            # should not pay for the other branch.
            attended, state = jax.lax.cond(
                jnp.all(state["position"] == 0),
                self.whole_blocks,
                functools.partial(forward_only, self.token_by_token),
                *(cell, tokens, state, start),
            )
        output_kernel = kernel(self, "attention_output", (2 * self.heads * self.head_dim, d), "heads", "embed")
        x = x + attended @ output_kernel.astype(self.dtype)
        x = constrain(x, "batch", "length", "embed")
        y = FeedForward(self.mlp_dim, self.dropout, name="feed_forward")(x)
        return constrain(y, "batch", "length", "embed"), state

    def horizontal_parameters(self, d: int) -> dict:
        """What the state update learns."""
        width, hidden = self.heads * self.head_dim, 2 * self.heads * self.head_dim
        parameters = {
            "initial_state": self.param(
                "initial_state", partitioned(nn.initializers.normal(0.1), None, "embed"), (self.states, d)
            ),
            "ids": self.param("state_ids", partitioned(nn.initializers.normal(1.0), None, "embed"), (self.states, d)),
            "norm": scale(self, "state_norm", d),
            "self_scale": scale(self, "state_scale", self.heads),
            "token_scale": scale(self, "state_cross_scale", self.heads),
        }
        for name in ("keys", "values", "queries", "cross_queries"):
            parameters[name] = kernel(self, f"state_{name}", (d, width), "embed", "heads")
        if self.configuration != "single":
            parameters["output"] = kernel(self, "state_output", (hidden, d), "heads", "embed")
            parameters["gate"] = gate_parameters(self, "state_gate", self.gate, hidden, d)
        if self.configuration == "dual":
            parameters["mlp_norm"] = scale(self, "state_mlp_norm", d)
        if self.configuration != "skip":
            mlp_in = d if self.configuration == "dual" else hidden
            parameters["mlp_hidden"] = kernel(self, "state_mlp_hidden", (mlp_in, self.mlp_dim), "embed", "mlp")
            parameters["mlp_output"] = kernel(self, "state_mlp_output", (self.mlp_dim, d), "mlp", "embed")
            parameters["mlp_gate"] = gate_parameters(self, "state_mlp_gate", self.gate, self.mlp_dim, d)
        return parameters

    def whole_blocks(self, cell: Mapping, tokens: Mapping, state: State, start: jax.Array) -> tuple[jax.Array, State]:
        """Attention of a segment that begins on a block: heads of window and states [b n 2hk], and the next state."""
        b, n = start.shape
        previous = {name: state[name][:, self.window :] for name in ("keys", "values")}
        in_window, keys, values = self.attend_window(cell, tokens, previous, start)

        begins = start.reshape(b, -1, self.window)[:, :, 0]  # [b m], m blocks
        two_blocks = {}
        for name in ("keys", "values"):
            pairs = overlapping(jnp.concatenate([previous[name], tokens[name]], axis=1), self.window, self.window)
            earlier = jnp.where(begins[:, :, None, None, None], 0.0, pairs[:, :, : self.window])
            two_blocks[name] = jnp.concatenate([earlier, pairs[:, :, self.window :]], axis=2).swapaxes(0, 1)

        def update(recurrent, block):
            begin, keys, values = block
            recurrent = jnp.where(begin[:, None, None], cell["initial_state"].astype(self.dtype), recurrent)
            seen = state_projections(cell, recurrent, self.heads)
            next_recurrent = next_state(cell, recurrent, seen, keys, values)
            return constrain(next_recurrent, "batch", None, "embed"), (seen["keys"], seen["values"])

        update = jax.checkpoint(update, prevent_cse=False) if self.remat_update else update
        blocks = (begins.swapaxes(0, 1), two_blocks["keys"], two_blocks["values"])
        recurrent, (state_keys, state_values) = jax.lax.scan(update, state["recurrent"], blocks)

        queries = scaled(tokens["cross_queries"], cell["cross_scale"]).reshape(b, -1, self.window, *in_window.shape[2:])
        in_states = attend(queries, state_keys.swapaxes(0, 1), state_values.swapaxes(0, 1))  # [b m w h k]
        attended = jnp.concatenate([in_window.reshape(b, n, -1), in_states.reshape(b, n, -1)], axis=-1)
        return attended, self.between_blocks(keys, values, recurrent)

    def between_blocks(self, keys: jax.Array, values: jax.Array, recurrent: jax.Array) -> State:
        """The state where no block is unfinished, from the last block's keys and values [b w h k]."""
        older = jnp.zeros_like(keys)
        return {
            **self.initial_state(keys.shape[0]),
            "keys": jnp.concatenate([older, keys], axis=1),
            "values": jnp.concatenate([older, values], axis=1),
            "recurrent": recurrent,
        }

    def attend_window(self, cell: Mapping, tokens: Mapping, previous: Mapping, start: jax.Array):
        return sliding_window_attention(
            tokens["queries"],
            tokens["keys"],
            tokens["values"],
            previous["keys"],
            previous["values"],
            start,
            cell["scale"],
            cell["bias"],
            query_tile_of(self.window, self.query_tile),
            cell["keep"],
        )

    def token_by_token(self, cell: Mapping, tokens: Mapping, state: State, start: jax.Array) -> tuple[jax.Array, State]:
        """The same for any length, from and to any place inside a block, with starts anywhere."""
        in_time = jax.tree.map(lambda a: a.swapaxes(0, 1)[:, :, None], dict(tokens))  # [n b 1 h k]
        state, attended = jax.lax.scan(
            lambda state, token: self.one_token(cell, *token, state), state, (in_time, start.swapaxes(0, 1))
        )
        return attended.swapaxes(0, 1), state

    def one_token(self, cell: Mapping, token: Mapping, start: jax.Array, state: State) -> tuple[State, jax.Array]:
        """One token of every row: its attention [b 2hk] and the state after it, updated where it ends a block."""
        b = start.shape[0]
        fresh = {
            "keys": jnp.zeros_like(state["keys"]),
            "values": jnp.zeros_like(state["values"]),
            "recurrent": jnp.broadcast_to(cell["initial_state"].astype(self.dtype), state["recurrent"].shape),
            "position": jnp.zeros_like(state["position"]),
        }
        state = {**state, **{name: rows_where(start, fresh[name], state[name]) for name in fresh}}

        begins = state["position"] == 0  # the states stay as they are until the block ends: project them once

        def project_states():
            seen = state_projections(cell, state["recurrent"], self.heads)
            return tuple(rows_where(begins, seen[name], state[f"state_{name}"]) for name in ("keys", "values"))

        state_keys, state_values = jax.lax.cond(
            jnp.any(begins), project_states, lambda: (state["state_keys"], state["state_values"])
        )
        previous = {name: state[name][:, self.window :] for name in ("keys", "values")}
        in_window, _, _ = self.attend_window({**cell, "keep": None}, token, previous, jnp.zeros((b, 1), bool))
        in_states = attend(scaled(token["cross_queries"], cell["cross_scale"]), state_keys, state_values)
        attended = jnp.concatenate([in_window.reshape(b, -1), in_states.reshape(b, -1)], axis=-1)

        keys, values = (jnp.concatenate([state[name][:, 1:], token[name]], axis=1) for name in ("keys", "values"))
        position = state["position"] + 1
        ends = position == self.window

        def update():
            seen = state_projections(cell, state["recurrent"], self.heads)
            return rows_where(ends, next_state(cell, state["recurrent"], seen, keys, values), state["recurrent"])

        recurrent = jax.lax.cond(jnp.any(ends), update, lambda: state["recurrent"])
        inside = {
            "keys": keys,
            "values": values,
            "recurrent": recurrent,
            "state_keys": state_keys,
            "state_values": state_values,
            "position": position,
        }
        between = self.between_blocks(keys[:, self.window :], values[:, self.window :], recurrent)
        return jax.tree.map(lambda a, b: rows_where(ends, a, b), between, inside), attended


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def forward_only(function: Callable, *arguments):
    """Calls a function that nothing is trained through: its gradient is NaN, so that no one does so unseen."""
    return function(*arguments)


def forward_only_backward(function: Callable, arguments: tuple, cotangents):
    del function, cotangents
    return jax.tree.map(
        lambda a: jnp.full_like(a, jnp.nan) if jnp.issubdtype(a.dtype, jnp.inexact) else None, arguments
    )


forward_only.defvjp(lambda function, *arguments: (function(*arguments), arguments), forward_only_backward)


def scaled(queries: jax.Array, scale: jax.Array) -> jax.Array:
    """Queries [... h k] times the learned scale of their head."""
    return (queries * jnp.abs(scale)[:, None]).astype(queries.dtype)


def rows_where(rows: jax.Array, chosen: jax.Array, other: jax.Array) -> jax.Array:
    """`chosen` in the rows that are true, `other` elsewhere."""
    return jnp.where(rows.reshape(-1, *[1] * (other.ndim - 1)), chosen, other)


def state_projections(cell: Mapping, recurrent: jax.Array, heads: int) -> dict[str, jax.Array]:
    """Keys, values and both sets of queries of the states, each [b s h k] (3.3: learned IDs tell the states apart)."""
    normed = rms_norm(recurrent, cell["norm"]) + cell["ids"].astype(recurrent.dtype)

    def heads_of(name):
        projected = normed @ cell[name].astype(normed.dtype)
        return projected.reshape(*projected.shape[:-1], heads, -1)

    return {
        "keys": l2_normalise(heads_of("keys")),
        "values": heads_of("values"),
        "queries": l2_normalise(heads_of("queries")),
        "cross_queries": l2_normalise(heads_of("cross_queries")),
    }


def next_state(cell: Mapping, recurrent: jax.Array, seen: Mapping, keys: jax.Array, values: jax.Array) -> jax.Array:
    """The horizontal direction: the states [b s d] after a block, given the tokens' keys and values [b 2w h k]."""
    b, s, _ = recurrent.shape
    in_states = attend(scaled(seen["queries"], cell["self_scale"]), seen["keys"], seen["values"])
    in_tokens = attend(scaled(seen["cross_queries"], cell["token_scale"]), keys, values)
    hidden = jnp.concatenate([in_states.reshape(b, s, -1), in_tokens.reshape(b, s, -1)], axis=-1)  # [b s 2hk]
    if "output" in cell:  # dual and skip
        z = hidden @ cell["output"].astype(hidden.dtype)  # eq. 1
        recurrent = gate(cell["gate"], recurrent, z, hidden)
        hidden = rms_norm(recurrent, cell["mlp_norm"]) if "mlp_norm" in cell else None
    if "mlp_hidden" in cell:  # dual and single
        hidden = nn.relu(hidden @ cell["mlp_hidden"].astype(hidden.dtype))  # [b s f]
        z = hidden @ cell["mlp_output"].astype(hidden.dtype)
        z = z if "output" in cell else jnp.tanh(z)  # eq. 4
        recurrent = gate(cell["mlp_gate"], recurrent, z, hidden)
    return recurrent
