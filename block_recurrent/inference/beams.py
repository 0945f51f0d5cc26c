"""Beam search through the state contract: a beam is a row of the state, and keeping the best reorders rows."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.inference.generation import Reader
from block_recurrent.ranges import RATE, WHOLE_1

Found = list[tuple[list[int], float]]  # new tokens and their log probability, best first


def never(tokens: Sequence[int]) -> bool:
    """No text is finished before it has all its tokens."""
    return False


class BeamSearch:
    """A model ready to search for its likeliest texts; compiles its reading of prompts and one step of all beams.

    Texts are compared by log probability over length ** `length_penalty`: only where they can finish at different
    lengths does it matter, and more than 0 then favours longer ones. Beams can lose the greedy continuation on their
    way to a worse one, so a row more follows it: what is found is never less likely.
    """

    def __init__(self, model: nn.Module, params, beams: int, length_penalty: float = 0.0, banned: Sequence[int] = ()):
        WHOLE_1.check("beams", beams)
        RATE.check("length_penalty", length_penalty)
        self.beams, self.length_penalty, self._reader = beams, length_penalty, Reader(model, params)
        self.rows = beams + (beams > 1)  # the last one is greedy; a single beam is greedy itself
        model = self._reader.model
        banned_tokens = np.asarray(banned, np.int32)

        def step(params, token, total, length, finished, state, start):
            logits, state = model.apply({"params": params}, token[:, None], state, start)
            added = jax.nn.log_softmax(logits[:, 0].at[:, banned_tokens].set(-jnp.inf))  # [b v]
            # A finished beam has one continuation, itself, in the place of token 0.
            itself = jnp.where(jnp.arange(added.shape[1]) == 0, 0.0, -jnp.inf)
            totals = total[:, None] + jnp.where(finished[:, None], itself, added)
            ranks = totals / length[:, None] ** length_penalty
            best = jax.lax.top_k(ranks[:beams].ravel(), beams)[1]
            if self.rows > beams:
                best = jnp.append(best, beams * added.shape[1] + jnp.argmax(totals[beams]))
            order, token = jnp.divmod(best, added.shape[1])
            return order, token, totals.ravel()[best], jax.tree.map(lambda a: a[order], state)

        self._step: Callable = jax.jit(step, donate_argnums=5)

    def __call__(
        self,
        prompt: Sequence[int],
        tokens: int,
        finished: Callable[[Sequence[int]], bool] = never,
        state: Any = None,
    ) -> Found:
        """The best continuations of a prompt by up to `tokens` tokens; `finished` says of new tokens that they end one.

        With a `state` of the model, of one row, the prompt goes on from there and starts no document.
        """
        if not len(prompt):
            raise UserError("a prompt is empty: the model needs a first token to go on from")
        texts: list[list[int]] = [[] for _ in range(self.rows)]
        over = np.zeros(self.rows, bool)
        first = np.isin(np.arange(self.rows), (0, self.beams))  # all beams are the same as yet
        total = np.where(first, 0.0, -np.inf).astype(np.float32)
        token = np.full(self.rows, prompt[-1], np.int32)
        start = np.full((self.rows, 1), state is None and len(prompt) == 1)
        state = self._read(prompt, state)
        for number in range(1, tokens + 1):
            length = np.where(over, [len(text) for text in texts], number).astype(np.float32)
            *chosen, state = self._step(self._reader.params, token, total, length, over, state, start)
            order, token, total = map(np.asarray, chosen)
            texts = [texts[i] if over[i] else [*texts[i], int(new)] for i, new in zip(order, token, strict=True)]
            over = np.array([over[i] or finished(text) for i, text in zip(order, texts, strict=True)])
            start = np.zeros_like(start)
            if over.all():
                break
        return self._ranked(texts, total)

    def _ranked(self, texts: list[list[int]], totals: np.ndarray) -> Found:
        """The texts, each once, best first."""
        once: dict[tuple[int, ...], float] = {}
        for text, total in zip(map(tuple, texts), map(float, totals), strict=True):
            if total > -np.inf:
                once[text] = max(total, once.get(text, -np.inf))
        found = sorted(once.items(), key=lambda item: -item[1] / max(len(item[0]), 1) ** self.length_penalty)
        return [(list(text), total) for text, total in found[: self.beams]]

    def _read(self, prompt: Sequence[int], state: Any) -> Any:
        """The state of all beams before the prompt's last token."""
        read, starts, row = self._reader, state is None, np.asarray(prompt, np.int32)[None]
        whole = read.whole_blocks(len(prompt))
        state = read.for_decoding(read(row[:, :whole], read.model.block, read.begin(1, state), starts))
        state = read(row[:, whole:-1], 1, state, starts and whole == 0)
        return jax.tree.map(lambda a: jnp.repeat(a, self.rows, axis=0), state)
