"""What a causal convolution sees: the token and those before it in its document, also those of earlier segments."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from block_recurrent.layers.attention import tail_of_document


def taps(x: jax.Array, tail: jax.Array, start: jax.Array, dilation: int = 1) -> Iterator[jax.Array]:
    """The inputs [b n d] at 0, 1, 2 ... times `dilation` tokens back, zeros before a document's first.

    `tail` [b back d] are the last inputs of the segment before; as far back as it reaches, there are taps.
    """
    n, back = x.shape[1], tail.shape[1]
    everything = jnp.concatenate([tail.astype(x.dtype), x], axis=1)  # [b back+n d]
    document = jnp.pad(jnp.cumsum(start, axis=1, dtype=jnp.int32), ((0, 0), (back, 0)))  # [b back+n]
    yield x
    for distance in range(dilation, back + 1, dilation):
        at = slice(back - distance, back - distance + n)
        same_document = document[:, at] == document[:, back:]
        yield jnp.where(same_document[..., None], everything[:, at], 0.0)


def next_tail(x: jax.Array, tail: jax.Array, start: jax.Array) -> jax.Array:
    """The tail for the next segment."""
    everything = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    return tail_of_document(everything, start).astype(tail.dtype)


def windows(x: jax.Array, tail: jax.Array, start: jax.Array, dilation: int = 1) -> tuple[jax.Array, jax.Array]:
    """All taps at each token side by side [b n taps*d], the token first, and the tail for the next segment."""
    if not tail.shape[1]:
        return x, tail
    return jnp.concatenate(list(taps(x, tail, start, dilation)), axis=-1), next_tail(x, tail, start)
