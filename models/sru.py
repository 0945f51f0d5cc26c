"""Simple recurrent units, SRU (Lei et al. 2018) and SRU++ (Lei 2021, arXiv 2102.12459).

In SRU all products are made before the loop; in SRU++ attention over the last `context` tokens takes the place of the
input projection. Where the authors' code (sru 3.0.0) and the papers differ, the code is followed: gates read the old
carry, the highway takes a matrix of its own where widths differ, and attention ends in a layer norm.

Its dropout is followed too: single numbers before the last projection, a mask for all tokens of a row in the cell, none
in the cell of the last layer (`cell_dropout`). The mask of the attention map alone is shared, by all rows.

One thing of the code is an option, `raw_memory`: with `norm` "pre" it normalises the tokens of a segment and takes
those of the segment before as they are, so that cutting a text elsewhere changes the result.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import xavier_uniform

from block_recurrent.errors import UserError
from block_recurrent.layers import inspection
from block_recurrent.layers.attention import query_tile_of, tail_of_document
from block_recurrent.layers.axes import partitioned
from block_recurrent.layers.dropout import dropout, in_training, row_dropout
from block_recurrent.layers.fields import check_fields
from block_recurrent.layers.norms import layer_norm
from block_recurrent.layers.parameters import (
    attention_mask,
    channel_vector,
    gate_kernel,
    kernel,
    offset,
    project_gates,
    scale,
    uniform,
    xavier_gates,
)
from block_recurrent.layers.products import product
from block_recurrent.layers.recurrence import recur
from block_recurrent.layers.window import WindowState, attend_window, is_ring, oldest_first, put

HIGHWAYS = ("input", "projected", None)
NORMS = (None, "pre", "post")

sigmoid = jax.nn.sigmoid


def sru_cell(activation, c, inputs, forget_weight, reset_weight, forget_bias, reset_bias):
    """The carry, and what the reset gate lets through in place of the highway; both gates read the old carry."""
    candidate, forget, reset, *highway = inputs
    forget = sigmoid(forget + forget_bias + forget_weight * c)
    reset = sigmoid(reset + reset_bias + reset_weight * c)
    c = candidate + (c - candidate) * forget
    opened = activation(c)
    return c, (opened - highway[0] if highway else opened) * reset


def reset_bias_init(highway_bias: float):
    """Biases [2 d] of the forget gate, zero, and of the reset gate."""
    return lambda key, shape, dtype: jnp.stack([jnp.zeros(shape[1:], dtype), jnp.full(shape[1:], highway_bias, dtype)])


class SRUBase(nn.Module):
    """What SRU, its encoder and SRU++ share: from pre-activations to outputs.

    `highway` is "input", what the reset gate lets pass instead being the input itself (where widths differ, a matrix of
    its own), "projected", always such a matrix, or None. `rescale` multiplies the input there by
    sqrt(1 + 2 exp(highway_bias)).
    """

    dim: int
    width: int
    highway: str | None = "input"
    highway_bias: float = 0.0
    rescale: bool = False
    norm: str | None = None
    tanh: bool = False
    dropout: float = 0.0
    backend: str | None = None
    dtype: jnp.dtype = jnp.float32

    block = 1

    def __post_init__(self):
        check_fields(self)
        for name, known in (("highway", HIGHWAYS), ("norm", NORMS)):
            if getattr(self, name) not in known:
                raise UserError(f"{name} {getattr(self, name)!r} is not one of {', '.join(map(str, known))}")
        super().__post_init__()

    @property
    def rate_in_cell(self) -> float:
        """The dropout of what the cell adds to the highway."""
        return self.dropout

    @property
    def gates(self) -> int:
        """Candidate, forget gate, reset gate, and the highway where it has a matrix of its own."""
        own = self.highway == "projected" or (self.highway == "input" and self.dim != self.width)
        return 4 if own else 3

    def norm_at(self, place: str, width: int) -> Callable[[jax.Array], jax.Array]:
        """The layer norm, if this is the place for it."""
        if self.norm != place:
            return lambda x: x
        weights = scale(self, "norm_scale", width), offset(self, "norm_offset", width)
        return lambda x: layer_norm(x, *weights)

    def cell_vectors(self) -> tuple[jax.Array, ...]:
        """What the cell learns for every channel: the carry's weights in both gates, and the gates' biases."""
        shape = (2, self.width)
        weights = channel_vector(self, "carry_weights", shape, uniform(1.0))
        biases = channel_vector(self, "bias", shape, reset_bias_init(self.highway_bias))
        return (*weights, *biases)

    def passed(self, u: jax.Array, x: jax.Array) -> jax.Array | None:
        """What the highway carries [b n d]."""
        if self.gates == 4:
            return u[:, :, 3]
        if self.highway is None:
            return None
        return x * math.sqrt(1.0 + 2.0 * math.exp(self.highway_bias)) if self.rescale else x

    def through_cell(
        self, u: jax.Array, passed: jax.Array | None, vectors: tuple, carry: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Outputs [b n d] and the last carry, from pre-activations u [b n gates d] and what the highway carries."""
        inputs = tuple(u[:, :, gate] for gate in range(3)) + (() if passed is None else (passed,))
        cell = functools.partial(sru_cell, jnp.tanh if self.tanh else lambda c: c)
        if inspection.looked_at(self):
            _, carries = recur(lambda *now: cell(*now)[:1] * 2, carry, inputs, start, shared=vectors)
            before = jnp.concatenate([carry[:, None], carries[:, :-1]], axis=1)
            before = jnp.where(start[..., None], 0.0, before)
            forget = sigmoid(inputs[1] + vectors[2] + vectors[0] * before)
            inspection.show(self, carry=carries, forget_gate=forget, input_gate=1.0 - forget)
        carry, opened = recur(cell, carry, inputs, start, shared=vectors, backend=self.backend)
        opened = row_dropout(self, opened, self.rate_in_cell)
        return opened if passed is None else passed + opened, carry


class SRULayer(SRUBase):
    """SRU from `dim` inputs to `width` channels; y, state = layer(x, state, start).

    `projection` makes the input projection of two factors of that rank. With `biased` candidate and highway have a bias
    too, as in the LRN authors' version of it.
    """

    projection: int | None = None
    biased: bool = False

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        return {"carry": jnp.zeros((batch, self.width), jnp.float32)}

    def pre_activations(self, x: jax.Array) -> jax.Array:
        """[b n gates d]; biases of the gates are the cell's."""
        u = self.norm_at("pre", self.dim)(x)
        if self.projection:
            shape = (self.dim, self.projection)
            u = product(u, kernel(self, "projection", shape, "embed", None, init=xavier_uniform()).astype(u.dtype))
        u = project_gates(u, gate_kernel(self, "kernel", (u.shape[-1], self.gates, self.width)))
        if self.biased:
            names = ["candidate_bias", None, None, "highway_offset"][: self.gates]
            zeros = jnp.zeros(self.width, jnp.float32)
            init = nn.initializers.zeros
            biases = [channel_vector(self, name, (self.width,), init) if name else zeros for name in names]
            u = u + jnp.stack(biases).astype(u.dtype)
        return u

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        x = x.astype(self.dtype)
        u = self.pre_activations(x)
        y, carry = self.through_cell(u, self.passed(u, x), self.cell_vectors(), state["carry"], start)
        return self.norm_at("post", self.width)(y), {"carry": carry}


class SRUEncoderLayer(SRULayer):
    """SRU over whole sequences that may end in padding, in both directions with `bidirectional`.

    y, carry = layer(x, padding, carry): padding [b n] is true where there is no token; there the carry stays and the
    output is zero. Half of `width` goes each way, the forward half first; the backward half ends at the first token. It
    knows the future, so it keeps no state and is no layer of a stack.
    """

    bidirectional: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, padding: jax.Array, carry: jax.Array | None = None):
        x = x.astype(self.dtype)
        carry = jnp.zeros((x.shape[0], self.width), jnp.float32) if carry is None else carry
        u, vectors = self.pre_activations(x), self.cell_vectors()
        # A candidate of zero behind a forget gate of one leaves the carry exactly as it is.
        kept = jnp.array([0.0, 1e9, 0.0, 0.0][: self.gates], u.dtype)[:, None]
        u = jnp.where(padding[:, :, None, None], kept, u)
        halves = functools.partial(jnp.split, indices_or_sections=2 if self.bidirectional else 1, axis=-1)
        passed = self.passed(u, x)
        ways = [halves(u), [None] * 2 if passed is None else halves(passed), halves(carry), *map(halves, vectors)]
        outputs, carries = [], []
        for way, (u, passed, carry, *vectors) in enumerate(zip(*ways, strict=False)):
            turn = (lambda a: a[:, ::-1]) if way else (lambda a: a)
            passed = passed if passed is None else turn(passed)
            y, carry = self.through_cell(turn(u), passed, tuple(vectors), carry, jnp.zeros(padding.shape, bool))
            outputs.append(turn(y))
            carries.append(carry)
        y = jnp.where(padding[..., None], 0.0, jnp.concatenate(outputs, axis=-1))
        return self.norm_at("post", self.width)(y), jnp.concatenate(carries, axis=-1)


class SRUppLayer(WindowState, SRUBase):
    """SRU++: attention over the last `context` tokens, the token itself included, makes the gates' pre-activations.

    Queries, keys and values live in `projection` dimensions; `alpha`, which starts at zero, lets attention in. Without
    `attention` the projection and its norm remain. The context may be longer at evaluation than in training: no
    parameter depends on it. `cell_dropout` is the cell's rate where it differs from `dropout`. The state holds the
    inputs of the last `context` tokens, from which training makes keys and values anew by its changed weights, and
    those keys and values, for everything else. In training an encoder's output put in place of those inputs makes the
    layer a decoder's; elsewhere its keys and values must be put there too.
    """

    projection: int = 0
    context: int = 0
    heads: int = 1
    attention: bool = True
    attention_norm: bool = True
    attention_dropout: float = 0.0
    cell_dropout: float | None = None
    raw_memory: bool = False
    query_tile: int | None = None

    def __post_init__(self):
        check_fields(self)
        if self.projection < 1 or self.projection % self.heads:
            raise UserError(f"projection {self.projection} does not divide into {self.heads} heads")
        if self.attention and self.context < 1:
            raise UserError(f"context {self.context}: attention sees one token at least")
        super().__post_init__()

    @property
    def rate_in_cell(self) -> float:
        return self.dropout if self.cell_dropout is None else self.cell_dropout

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        state = {"carry": jnp.zeros((batch, self.width), jnp.float32)}
        if self.attention:
            in_heads = (batch, self.context, self.heads, self.projection // self.heads)
            state["memory"] = jnp.zeros((batch, self.context, self.dim), self.dtype)
            state |= {"keys": jnp.zeros(in_heads, self.dtype), "values": jnp.zeros(in_heads, self.dtype)}
        return state

    def for_decoding(self, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """With rings of keys, values and inputs; `raw_memory` makes keys and values of the inputs at every call."""
        return super().for_decoding(state) if self.attention and not self.raw_memory else state

    def from_decoding(self, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if not is_ring(state):
            return state
        filled = oldest_first(state["filled"], state["place"])[..., None]
        memory = jnp.where(filled, oldest_first(state["memory"], state["place"]), 0.0)
        return {**super().from_decoding(state), "memory": memory}

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        if is_ring(state) and (x.shape[1] > 1 or in_training(self)):
            y, state = self.through(x, self.from_decoding(state), start)
            return y, self.for_decoding(state)
        return self.through(x, state, start)

    def through(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        x = x.astype(self.dtype)
        norm = self.norm_at("pre", self.dim)
        shape = (self.dim, self.projection)
        down = kernel(self, "projection_kernel", shape, "embed", None, init=xavier_uniform()).astype(self.dtype)
        queries = product(norm(x), down)  # [b n p]
        mixed, next_state = queries, {}
        if self.attention:
            attended, next_state = self.attend(x, queries, down, norm, state, start)
            alpha = self.param("alpha", partitioned(nn.initializers.zeros), (), jnp.float32)
            mixed = queries + alpha.astype(self.dtype) * attended
        if self.attention_norm:
            p = self.projection
            mixed = layer_norm(mixed, scale(self, "attention_norm_scale", p), offset(self, "attention_norm_offset", p))
        mixed = dropout(self, mixed, self.dropout)
        shape = (self.projection, self.gates, self.width)
        weights = gate_kernel(self, "kernel", shape, xavier_gates(1.0 - self.dropout))  # sqrt(1 - p), in the code alone
        u = project_gates(mixed, weights)
        y, carry = self.through_cell(u, self.passed(u, x), self.cell_vectors(), state["carry"], start)
        return self.norm_at("post", self.width)(y), {"carry": carry, **next_state}

    def attend(self, x: jax.Array, queries: jax.Array, down: jax.Array, norm: Callable, state: dict, start: jax.Array):
        """What attention adds to the queries [b n p], and what the state remembers of it."""
        b, n, p = queries.shape
        weights = gate_kernel(self, "keys_values", (p, 2, p))

        def keys_and_values(z):
            return (
                part.reshape(*z.shape[:2], self.heads, -1) for part in jnp.moveaxis(project_gates(z, weights), 2, 0)
            )

        window = state
        if in_training(self) or self.raw_memory:
            memory = state["memory"]
            there = jnp.any(memory != 0.0, axis=-1, keepdims=True)
            memory = memory if self.raw_memory else jnp.where(there, norm(memory), 0.0)
            window = dict(zip(("keys", "values"), keys_and_values(product(memory, down)), strict=True))
        keys, values = keys_and_values(queries)
        attended, window = attend_window(
            queries.reshape(keys.shape),
            keys,
            values,
            window,
            start,
            jnp.full((self.heads,), (p // self.heads) ** -0.5),
            None,
            query_tile=query_tile_of(self.context, self.query_tile),
            keep=attention_mask(self, self.attention_dropout, self.heads, self.context, n),
            sees_itself=True,
            mask_empty=True,
            starts_anywhere=True,
        )
        if is_ring(window):
            memory = put(state["memory"], x, state["place"])
        else:
            memory = tail_of_document(jnp.concatenate([state["memory"], x], axis=1), start)
        return attended.reshape(b, n, p), {"memory": memory, **window}
