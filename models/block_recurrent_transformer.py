"""The recurrent layer of "Block-Recurrent Transformers" (Hutchins et al. 2022, arXiv 2203.07852).

A transformer layer is applied along the sequence, a block of `window` tokens and `states` state vectors at a time. In
the vertical direction tokens attend to the window before them and, in parallel, to the states; in the horizontal
direction states attend to themselves and to the tokens of this block and the one before, and gates take the place of
residuals. Keys and values are shared between the directions: four sets of queries, two of keys and values.

Only the state update is sequential. Token projections, attention within the window and, given the states of all
blocks, attention to the states and the feed-forward sublayer are done for all blocks at once.

Where the authors' code differs from their paper, the code that produced the published numbers is followed: RMS norms
and state IDs added after the norm. Four differences have an option for the paper's text: `z_bias` (eq. 1; the code has
none), `z_tanh` (eq. 4; the code's tanh belongs to the configuration `single`, whatever the gate), and, as
models/sliding_window.py says of the window, `sees_itself` and `mask_empty`.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers import health, inspection
from block_recurrent.layers.attention import (
    attend,
    attend_by_head,
    attention_weights,
    heads_first,
    holds_token,
    overlapping,
    query_tile_of,
    scaled,
)
from block_recurrent.layers.axes import constrain, partitioned
from block_recurrent.layers.dropout import in_training, tied_dropout
from block_recurrent.layers.feed_forward import FeedForward
from block_recurrent.layers.fields import check_fields
from block_recurrent.layers.gates import GATES, gate, gate_parameters
from block_recurrent.layers.norms import l2_normalise, rms_norm
from block_recurrent.layers.parameters import attention_mask, bias_table, in_heads, kernel, offset, scale
from block_recurrent.layers.products import product
from block_recurrent.layers.untrained import untrained
from block_recurrent.layers.window import attend_window, is_ring, select_rows
from models.block_recurrent_decoding import RecurrentDecoding

CONFIGURATIONS = ("dual", "single", "skip")
TANH = ("single", "lstm")

State = dict[str, jax.Array]


class BlockRecurrentLayer(RecurrentDecoding, nn.Module):
    """Vertical and horizontal direction of the recurrent cell; y, state = layer(x, state, start).

    The state holds the recurrent vectors of the current block, the keys and values of the block of tokens before, and,
    of a block that is not finished, how many tokens have come, theirs too, and those of its states.

    `z_tanh` says where z goes through tanh: in the configuration `single`, or with the gate `lstm`.
    """

    heads: int
    head_dim: int
    mlp_dim: int
    window: int
    states: int
    dim: int
    gate: str = "fixed"
    configuration: str = "skip"
    z_bias: bool = False
    z_tanh: str = "single"
    sees_itself: bool = False
    mask_empty: bool = False
    query_tile: int | None = None
    remat_update: bool = False
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        check_fields(self)
        for name, known in (("gate", GATES), ("configuration", CONFIGURATIONS), ("z_tanh", TANH)):
            value = getattr(self, name)
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

    def setup(self):
        d, width, both = self.dim, self.heads * self.head_dim, 2 * self.heads * self.head_dim
        self.attention_norm = scale(self, "attention_norm", d)
        self.token_kernels = {
            name: kernel(self, name, (d, width), "embed", "heads")
            for name in ("queries", "cross_queries", "keys", "values")
        }
        self.cell = {
            "scale": scale(self, "attention_scale", self.heads),
            "cross_scale": scale(self, "cross_scale", self.heads),
            "bias": bias_table(self, "relative_bias", self.heads),
            **self.horizontal_parameters(d, width, both),
        }
        self.attention_output = kernel(self, "attention_output", (both, d), "heads", "embed")
        self.feed_forward = FeedForward(self.mlp_dim, self.dropout)

    def horizontal_parameters(self, d: int, width: int, both: int) -> dict:
        """What the state update learns."""
        shape = (self.states, d)
        parameters = {
            "initial_state": self.param(
                "initial_state", partitioned(nn.initializers.normal(0.1), None, "embed"), shape
            ),
            "ids": self.param("state_ids", partitioned(nn.initializers.normal(1.0), None, "embed"), shape),
            "norm": scale(self, "state_norm", d),
            "self_scale": scale(self, "state_scale", self.heads),
            "token_scale": scale(self, "state_cross_scale", self.heads),
        }
        for name in ("keys", "values", "queries", "cross_queries"):
            parameters[name] = kernel(self, f"state_{name}", (d, width), "embed", "heads")
        if self.configuration != "single":
            parameters["output"] = kernel(self, "state_output", (both, d), "heads", "embed")
            parameters["output_bias"] = offset(self, "state_output_bias", d) if self.z_bias else None
            parameters["gate"] = gate_parameters(self, "state_gate", self.gate, both, d)
        if self.configuration == "dual":
            parameters["mlp_norm"] = scale(self, "state_mlp_norm", d)
        if self.configuration != "skip":
            mlp_in = d if self.configuration == "dual" else both
            parameters["mlp_hidden"] = kernel(self, "state_mlp_hidden", (mlp_in, self.mlp_dim), "embed", "mlp")
            parameters["mlp_output"] = kernel(self, "state_mlp_output", (self.mlp_dim, d), "mlp", "embed")
            parameters["mlp_output_bias"] = offset(self, "state_mlp_output_bias", d) if self.z_bias else None
            parameters["mlp_gate"] = gate_parameters(self, "state_mlp_gate", self.gate, self.mlp_dim, d)
        return parameters

    def __call__(
        self, x: jax.Array, state: State, start: jax.Array, shown: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[jax.Array, State]:
        """`shown` is given inside a feedback stack, which calls with one token or one whole block."""
        x = x.astype(self.dtype)
        u = tied_dropout(self, rms_norm(x, self.attention_norm), self.dropout)
        tokens = {name: in_heads(u, weights, self.heads) for name, weights in self.token_kernels.items()}
        tokens = {name: a if name == "values" else l2_normalise(a) for name, a in tokens.items()}
        keep = attention_mask(self, self.dropout, self.heads, self.window, x.shape[1])
        cell = dict(self.cell)
        measures = seen = {}
        decoding = is_ring(state)
        if x.shape[1] % self.window or (decoding and x.shape[1] == 1):
            attended, state, _, _ = self.inside_a_block(cell, keep, tokens, state, start)
            return self.after_attention(x, attended), state
        state = self.from_decoding(state)
        aligned = jnp.all(state["position"] == 0)
        if shown is not None or in_training(self) or inspection.looked_at(self):
            attended, state, measures, seen = self.whole_blocks(cell, keep, tokens, state, start)
            attended = jnp.where(aligned, attended, jnp.nan)
        else:
            # A stream fed in odd pieces may stand inside a block here.
            attended, state, _, _ = jax.lax.cond(
                aligned, self.whole_blocks, self.inside_a_block, *(cell, keep, tokens, state, start)
            )
        if measures:
            share = health.share_of_states(attended, self.attention_output.astype(self.dtype))
            health.sow(self, **measures, state_share=share)
        inspection.show(self, **seen)
        return self.after_attention(x, attended), self.for_decoding(state) if decoding else state

    def after_attention(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """The layer's output [b n d], from what the heads of window and states have attended to, [b n 2hk]."""
        x = constrain(x + product(attended, self.attention_output.astype(x.dtype)), "batch", "length", "embed")
        return constrain(self.feed_forward(x), "batch", "length", "embed")

    def shown(self, state: State, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [b s h k] of the states that the block beginning here will see, or the token in decoding."""
        if is_ring(state):
            state = self.renewed(self.cell, state, start[:, 0])
            return heads_first(state["state_keys"]), heads_first(state["state_values"])
        seen = self.projections(self.cell, self.reset_at_starts(self.cell, start[:, 0], state["recurrent"]))
        return seen["keys"], seen["values"]

    def whole_blocks(
        self, cell: Mapping, keep: jax.Array | None, tokens: Mapping, state: State, start: jax.Array
    ) -> tuple[jax.Array, State, dict, dict]:
        """Attention of a segment that begins on a block: heads of window and states [b n 2hk], and the next state.

        Beside them what the health of the states is measured by, where somebody watches, and, where somebody looks
        inside, of every block its states, their gates, and who attended to what.
        """
        b, n = start.shape
        watched, looked_at = health.watched(self), inspection.looked_at(self)
        previous = {name: state[name][:, self.window :] for name in ("keys", "values")}
        in_window, last = self.attend_tokens(cell, keep, tokens, previous, start)

        begins = start.reshape(b, -1, self.window)[:, :, 0]  # [b m], m blocks
        two_blocks = {}
        for name in ("keys", "values"):
            pairs = overlapping(jnp.concatenate([previous[name], tokens[name]], axis=1), self.window, self.window)
            earlier = jnp.where(begins[:, :, None, None, None], 0.0, pairs[:, :, : self.window])
            both = jnp.concatenate([earlier, pairs[:, :, self.window :]], axis=2).swapaxes(0, 1)
            two_blocks[name] = heads_first(both)  # [m b h 2w k]

        def update(recurrent, block):
            begin, keys, values = block
            recurrent = self.reset_at_starts(cell, begin, recurrent)
            seen = self.projections(cell, recurrent)
            after, openness = self.next_state(cell, recurrent, seen, keys, values)
            measures = {**health.of_states(recurrent, after), **jax.tree.map(jnp.mean, openness)} if watched else {}
            inside = {}
            if looked_at:
                queries = scaled(seen["cross_queries"], cell["token_scale"])
                weights = attention_weights(heads_first(queries), keys)  # [b h s 2w]
                inside = {"states": recurrent, "states_to_tokens": weights}
                inside |= {name: jnp.broadcast_to(gate, recurrent.shape) for name, gate in openness.items()}
            return constrain(after, "batch", None, "embed"), (seen["keys"], seen["values"], measures, inside)

        update = jax.checkpoint(update, prevent_cse=False) if self.remat_update else update
        blocks = (begins.swapaxes(0, 1), two_blocks["keys"], two_blocks["values"])
        recurrent, (state_keys, state_values, measures, inside) = jax.lax.scan(update, state["recurrent"], blocks)

        queries = scaled(tokens["cross_queries"], cell["cross_scale"]).reshape(b, -1, self.window, *in_window.shape[2:])
        in_states = attend_by_head(queries, state_keys.swapaxes(0, 1), state_values.swapaxes(0, 1))  # [b m w h k]
        attended = jnp.concatenate([in_window.reshape(b, n, -1), in_states.reshape(b, n, -1)], axis=-1)
        inside = jax.tree.map(lambda a: a.swapaxes(0, 1), inside)  # [b m ...]
        if looked_at:
            weights = attention_weights(heads_first(queries), heads_first(state_keys.swapaxes(0, 1)))  # [b m h w s]
            inside["tokens_to_states"] = heads_first(weights).reshape(b, n, self.heads, -1)
        return attended, self.between_blocks(**last, recurrent=recurrent), jax.tree.map(jnp.mean, measures), inside

    def inside_a_block(
        self, cell: Mapping, keep: jax.Array | None, tokens: Mapping, state: State, start: jax.Array
    ) -> tuple[jax.Array, State, dict, dict]:
        """The same for any length, from any place, with starts anywhere; not to be trained through, nothing dropped."""
        del keep
        inputs = (cell, tokens, state)
        outputs = self.token_by_token(*jax.lax.stop_gradient(inputs), start)
        return *untrained(outputs, inputs), {}, {}

    def between_blocks(self, keys: jax.Array, values: jax.Array, recurrent: jax.Array) -> State:
        """The state where no block is unfinished, from the last block's keys and values [b w h k]."""
        older = jnp.zeros_like(keys)
        return {
            **self.initial_state(keys.shape[0]),
            "keys": jnp.concatenate([older, keys], axis=1),
            "values": jnp.concatenate([older, values], axis=1),
            "recurrent": recurrent,
        }

    def attend_tokens(
        self, cell: Mapping, keep: jax.Array | None, tokens: Mapping, window: Mapping, start: jax.Array
    ) -> tuple[jax.Array, State]:
        """Attention of tokens [b n h k] over their window, and the next window."""
        return attend_window(
            tokens["queries"],
            tokens["keys"],
            tokens["values"],
            window,
            start,
            cell["scale"],
            cell["bias"],
            query_tile=query_tile_of(self.window, self.query_tile),
            keep=keep,
            sees_itself=self.sees_itself,
            mask_empty=self.mask_empty,
        )

    def reset_at_starts(self, cell: Mapping, start: jax.Array, recurrent: jax.Array) -> jax.Array:
        """The states [b s d], in rows [b] where a document starts the learned initial ones."""
        return select_rows(start, cell["initial_state"].astype(recurrent.dtype), recurrent)

    def projections(self, cell: Mapping, recurrent: jax.Array) -> dict[str, jax.Array]:
        """Keys, values and both sets of queries of the states, [b s h k] each (3.3: learned IDs tell states apart)."""
        normed = rms_norm(recurrent, cell["norm"]) + cell["ids"].astype(recurrent.dtype)
        names = ("keys", "values", "queries", "cross_queries")
        projected = {name: in_heads(normed, cell[name], self.heads) for name in names}
        return {name: a if name == "values" else l2_normalise(a) for name, a in projected.items()}

    def next_state(
        self, cell: Mapping, recurrent: jax.Array, seen: Mapping, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, dict]:
        """The horizontal direction: the states [b s d] after a block, given the tokens' keys and values [b h 2w k].

        Beside them how open the gates were, for each feature.
        """
        b, s, _ = recurrent.shape
        held = holds_token(heads_first(keys))[:, None, None, :] if self.mask_empty else None
        in_states = attend_by_head(scaled(seen["queries"], cell["self_scale"]), seen["keys"], seen["values"])
        queries = heads_first(scaled(seen["cross_queries"], cell["token_scale"]))
        in_tokens = heads_first(attend(queries, keys, values, held=held))
        hidden = jnp.concatenate([in_states.reshape(b, s, -1), in_tokens.reshape(b, s, -1)], axis=-1)  # [b s 2hk]
        squash = jnp.tanh if self.z_tanh in (self.configuration, self.gate) else lambda z: z  # eq. 4
        openness = {}
        if self.configuration != "single":
            z = squash(affine(hidden, cell["output"], cell["output_bias"]))  # eq. 1
            recurrent, openness["gate_kept"], openness["gate_taken"] = gate(cell["gate"], recurrent, z, hidden)
        if self.configuration != "skip":
            hidden = rms_norm(recurrent, cell["mlp_norm"]) if self.configuration == "dual" else hidden
            hidden = nn.relu(product(hidden, cell["mlp_hidden"].astype(hidden.dtype)))  # [b s f]
            z = squash(affine(hidden, cell["mlp_output"], cell["mlp_output_bias"]))
            gated = gate(cell["mlp_gate"], recurrent, z, hidden)
            recurrent, openness["mlp_gate_kept"], openness["mlp_gate_taken"] = gated
        return recurrent, openness


def affine(x: jax.Array, weights: jax.Array, bias: jax.Array | None) -> jax.Array:
    y = product(x, weights.astype(x.dtype))
    return y if bias is None else y + bias.astype(x.dtype)
