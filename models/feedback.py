"""Feedback (Hutchins et al. 2022, 3.7): every layer attends to the recurrent state of the block before.

The state that a block sees is needed before the first layer has seen the block's tokens: so the whole stack, and not
the recurrent layer alone, is applied along the sequence. Of several recurrent layers the last one's state is fed back.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers import health, inspection
from block_recurrent.layers.dropout import in_training
from block_recurrent.layers.stack import Stack, runs_of
from block_recurrent.layers.untrained import untrained
from block_recurrent.layers.window import is_ring


def feedback_stack(layers: Sequence[nn.Module], scan_depth: bool = True, remat: bool = False) -> "FeedbackStack":
    """Builds a stack whose layers all attend to the state of its last recurrent layer."""
    stack = FeedbackStack(*runs_of(layers, lambda layer: scan_depth and not feeds_back(layer)), remat=remat)
    recurrent = [layer for layer in stack.layers if feeds_back(layer)]
    if not recurrent:
        raise UserError("feedback needs a recurrent layer: name one in the pattern")
    for layer in recurrent:
        if layer.block != stack.block:
            raise UserError(
                f"feedback runs the stack over blocks of {stack.block}, and a recurrent layer has blocks of "
                f"{layer.block}: give them one window"
            )
    return stack


def feeds_back(layer: nn.Module) -> bool:
    """A recurrent layer shows its states to others."""
    return hasattr(layer, "shown")


def is_decoding(stack: "FeedbackStack", state: tuple) -> bool:
    """Whether a state has the form that decoding keeps."""
    return any(is_ring(own) for layer, own in zip(stack.layers, state, strict=True) if feeds_back(layer))


class FeedbackStack(Stack):
    """A stack run over blocks of tokens, or over single ones; build it with `feedback_stack`."""

    in_pieces = True

    @nn.compact
    def __call__(self, x: jax.Array, state: tuple, start: jax.Array) -> tuple[jax.Array, tuple]:
        decoding = is_decoding(self, state)
        if x.shape[1] % self.block or (decoding and x.shape[1] == 1):
            return (over_tokens if self.is_initializing() else inside_a_block)(self, x, state, start)
        state = self.from_decoding(state)
        positions = [own["position"] for layer, own in zip(self.layers, state, strict=True) if feeds_back(layer)]
        if self.is_initializing() or in_training(self) or inspection.looked_at(self):
            y, state = over_blocks(self, x, state, start)
        else:
            # As in the recurrent layer: a stream fed in odd pieces may stand inside a block.
            y, state = nn.cond(jnp.all(jnp.stack(positions) == 0), over_blocks, inside_a_block, self, x, state, start)
        return y, self.for_decoding(state) if decoding else state

    def one_piece(self, x: jax.Array, state: tuple, start: jax.Array) -> tuple[jax.Array, tuple]:
        """All layers on a whole block [b w d], or on one token [b 1 d]."""
        layer, own = [pair for pair in zip(self.layers, state, strict=True) if feeds_back(pair[0])][-1]
        return self.through_layers(x, state, start, layer.shown(own, start))


def over_pieces(stack: FeedbackStack, x: jax.Array, state: tuple, start: jax.Array, length: int):
    """A segment, `length` tokens at a time."""

    def piece(stack, state, piece):
        y, state = stack.one_piece(piece[0], state, piece[1])
        return state, y

    scan = nn.scan(
        piece,
        variable_broadcast="params",
        variable_axes={health.COLLECTION: 0, inspection.COLLECTION: 0},
        split_rngs={"params": False, "dropout": True},
    )
    b, n, d = x.shape
    pieces = (x.reshape(b, -1, length, d).swapaxes(0, 1), start.reshape(b, -1, length).swapaxes(0, 1))
    state, y = scan(stack, state, pieces)
    return y.swapaxes(0, 1).reshape(b, n, d), state


def over_blocks(stack: FeedbackStack, x: jax.Array, state: tuple, start: jax.Array):
    return over_pieces(stack, x, state, start, stack.block)


def over_tokens(stack: FeedbackStack, x: jax.Array, state: tuple, start: jax.Array):
    """For any length, from any place inside a block; a state of either form."""
    y, after = over_pieces(stack, x, stack.for_decoding(state), start, 1)
    return y, after if is_decoding(stack, state) else stack.from_decoding(after)


def inside_a_block(stack: FeedbackStack, x: jax.Array, state: tuple, start: jax.Array):
    """Token by token, not to be trained through."""
    forward = nn.map_variables(over_tokens, "params", trans_in_fn=jax.lax.stop_gradient)
    outputs = forward(stack, *jax.lax.stop_gradient((x, state)), start)
    return untrained(outputs, (stack.variables["params"], x, state))
