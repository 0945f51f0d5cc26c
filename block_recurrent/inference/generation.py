"""Generation through the state contract: one token at a time, the same cost at every position."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from block_recurrent.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits; temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if self.temperature < 0:
            raise UserError(
                f"temperature {self.temperature} is negative: 0 takes the likeliest token, 1 samples the model"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k {self.top_k} leaves no token: give 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is not a share of probability: give more than 0 and at most 1")

    def __call__(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Draws tokens [b] from logits [b v]."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None and self.top_p < 1:
            # The smallest set of likeliest tokens that reaches top_p: those before which less than top_p has gathered.
            ordered = jnp.sort(logits, axis=-1)[:, ::-1]
            probabilities = jax.nn.softmax(ordered, axis=-1)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            least = jnp.min(jnp.where(before < self.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(key, logits, axis=-1)


class Generator:
    """A model ready to generate; compiles one block-wide prefill and one single-token step."""

    def __init__(self, model: nn.Module, params, sampling: Sampling, banned: Sequence[int] = ()):
        self.model, self.params = model, params
        banned_tokens = np.asarray(banned, np.int32)

        def prefill(params, tokens, state, start):
            return model.apply({"params": params}, tokens, state, start, method="features")[1]

        def step(params, given, use_given, drawn, state, start, key):
            token = jnp.where(use_given, given, drawn)
            logits, state = model.apply({"params": params}, token[:, None], state, start[:, None])
            logits = logits[:, 0].at[:, banned_tokens].set(-jnp.inf)
            key, draw = jax.random.split(key)
            return sampling(logits, draw), state, key

        self._prefill: Callable = jax.jit(prefill, donate_argnums=2)
        self._step: Callable = jax.jit(step, donate_argnums=4)

    def __call__(self, prompts: Sequence[Sequence[int]], tokens: int, seed: int = 0) -> Iterator[np.ndarray]:
        """Continues prompts of any lengths side by side: yields tokens [b] as they are drawn, -1 where a row is still
        reading its prompt or has all its `tokens` already.
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        if not lengths.all():
            raise UserError("a prompt is empty: the model needs a first token to go on from")
        rows, longest = len(prompts), int(lengths.max())
        given = np.zeros((rows, longest + tokens), np.int32)
        for row, prompt in enumerate(prompts):
            given[row, : len(prompt)] = prompt
        # Put where the parameters are, like what the steps return: a jitted function compiles anew for a stray array.
        device = next(iter(jax.tree.leaves(self.params)[0].devices()))
        begin = (self.model.initial_state(rows), jnp.zeros(rows, jnp.int32), jax.random.key(seed))
        state, drawn, key = jax.device_put(begin, device)
        block = self.model.block
        whole = (int(lengths.min()) - 1) // block * block  # the last token of every prompt goes through a step
        for at in range(0, whole, block):
            start = np.zeros((rows, block), bool)
            start[:, 0] = at == 0
            state = self._prefill(self.params, given[:, at : at + block], state, start)
        for at in range(whole, longest + tokens - 1):
            drawn, state, key = self._step(
                self.params, given[:, at], at < lengths, drawn, state, np.full(rows, at == 0), key
            )
            new = at + 1 - lengths  # how many new tokens each row had before this one
            if (new >= 0).any():
                yield np.where((new >= 0) & (new < tokens), np.asarray(drawn), -1)
