"""Generation through the state contract: one token at a time, the same cost at every position."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.inference.compute_copy import compute_copy
from block_recurrent.layers.stack import unrolled, unstacked_params, unstacked_state
from block_recurrent.ranges import SEED, SHARE, WHOLE_1, Range

ALLOWED = {  # what float32 can tell apart
    "temperature": Range(least=0, most=1e6),
    "top_k": WHOLE_1,
    "top_p": Range(above=0, most=1),
    "min_p": SHARE,
    "repetition_penalty": Range(least=1e-6, most=1e6),
}
LEAST_TEMPERATURE = 1e-6  # of draws: logits are divided by it
STEPS = 8  # tokens that one program draws: more are faster, and seen later


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits; temperature 0 takes the likeliest.

    Tokens that a row has already are made less likely by `repetition_penalty` (Keskar et al. 2019, 4.1; 1 is none).
    Then the temperature applies, and of what can be drawn are left the `top_k` likeliest, the likeliest that together
    reach `top_p`, and those at least `min_p` times as likely as the likeliest.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        for name, allowed in ALLOWED.items():
            if (value := getattr(self, name)) is not None:
                allowed.check(name, value)

    def __call__(self, logits: jax.Array, keys: jax.Array, seen: jax.Array) -> jax.Array:
        """Draws tokens [b] from logits [b v], by a key for each row [b]; `seen` [b v] are the tokens a row has."""
        if self.repetition_penalty != 1:
            penalty = jnp.where(logits > 0, 1 / self.repetition_penalty, self.repetition_penalty)
            logits = jnp.where(seen, logits * penalty, logits)
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1)
        logits = logits / max(self.temperature, LEAST_TEMPERATURE)
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
        if self.min_p:
            least = jnp.max(logits, axis=-1, keepdims=True) + np.log(self.min_p)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.vmap(jax.random.categorical)(keys, logits)


class Reader:
    """Takes the state of a model through the tokens of prompts, without their logits.

    Its own model and parameters have every layer apart: one token's step would copy each out of a stack. Parameters
    that the model computes with in a smaller type are cast to it here, once.
    """

    def __init__(self, model: nn.Module, params):
        self.stack = model.stack  # as states come
        self.model = model = model.clone(stack=unrolled(self.stack))
        self.params = {**params, "stack": unstacked_params(self.stack, params["stack"])}

        def one_token(params, state):
            return model.apply({"params": params}, model.blank(1, 1), state, np.zeros((1, 1), bool))

        state = jax.eval_shape(lambda: model.for_decoding(model.initial_state(1)))
        self.params = compute_copy(one_token, self.params, state)
        self.for_decoding: Callable = jax.jit(model.for_decoding)

        def read(params, tokens, state, start):
            return model.apply({"params": params}, tokens, state, start, method="features")[1]

        self._read: Callable = jax.jit(read, donate_argnums=2)

    @property
    def device(self) -> jax.Device:
        """Where the parameters are, and all else should be: a jitted function compiles anew for a stray array."""
        return next(iter(jax.tree.leaves(self.params)[0].devices()))

    def begin(self, rows: int, state: Any = None) -> Any:
        """A state of so many rows: the empty one, or a copy of the given one, which steps would otherwise consume."""
        if state is None:
            return jax.device_put(self.model.initial_state(rows), self.device)
        given = jax.tree.leaves(state)[0].shape[0]
        if given not in (1, rows):
            raise UserError(f"a state of {given} rows cannot go on with {rows} prompts: give one row, or one for each")
        copied = jax.tree.map(lambda a: jnp.take(a, np.arange(rows) % given, axis=0), state)
        return jax.device_put(unstacked_state(self.stack, copied), self.device)

    def __call__(self, tokens: np.ndarray, piece: int, state: Any, starts: bool) -> Any:
        """The state after tokens [b n], read `piece` at a time; `starts` if the first of them start documents."""
        for at in range(0, tokens.shape[1], piece):
            start = np.zeros((len(tokens), piece), bool)
            start[:, 0] = starts and at == 0
            state = self._read(self.params, tokens[:, at : at + piece], state, start)
        return state

    def whole_blocks(self, length: int) -> int:
        """How many of a prompt's tokens can be read in blocks; its last one is left, for the logits after it."""
        return (length - 1) // self.model.block * self.model.block


class Generator:
    """A model ready to generate; compiles one block-wide prefill, and one program of a few single-token steps."""

    def __init__(self, model: nn.Module, params, sampling: Sampling, banned: Sequence[int] = ()):
        self._reader = Reader(model, params)
        self.model = model = self._reader.model
        banned_tokens = np.asarray(banned, np.int32)

        def step(params, key, carry, now):
            drawn, seen, state = carry
            given, number, start = now
            token = jnp.where(given < 0, drawn, given)
            rows = jnp.arange(len(token))
            logits, state = model.apply({"params": params}, token[:, None], state, start[:, None])
            logits = logits[:, 0].at[:, banned_tokens].set(-jnp.inf)
            seen = seen.at[rows, token].set(True)
            keys = jax.vmap(lambda row, number: jax.random.fold_in(jax.random.fold_in(key, row), number))(rows, number)
            drawn = sampling(logits, keys, seen)
            return (drawn, seen, state), drawn

        def steps(params, key, carry, columns):
            return jax.lax.scan(functools.partial(step, params, key), carry, columns)

        self._steps: Callable = jax.jit(steps, donate_argnums=2)

    def __call__(
        self, prompts: Sequence[Sequence[int]], tokens: int, seed: int = 0, state: Any = None
    ) -> Iterator[np.ndarray]:
        """Continues prompts of any lengths side by side: yields tokens [b] as they are drawn, -1 where a row is still
        reading its prompt or has all its `tokens` already.

        A row's n-th draw is a matter of the seed, the row's index and n alone: with the same seed it continues in the
        same way whatever the other rows are, as far as the model's arithmetic gives the same logits in another batch.

        With a `state` of the model, of one row for all prompts or of one for each, the prompts go on from there and
        start no document. The repetition penalty does not know what tokens made the state.
        """
        SEED.check("seed", seed)
        WHOLE_1.check("tokens", tokens)
        lengths = np.array([len(prompt) for prompt in prompts])
        if not lengths.all():
            raise UserError("a prompt is empty: the model needs a first token to go on from")
        # Each program's tokens are fetched while the next one runs.
        calls = self._calls(prompts, lengths, tokens, seed, state)
        for (drawn, numbers), _ in pairwise(chain(calls, [None])):
            for column, number in zip(np.asarray(drawn), numbers, strict=True):
                new = (number >= 0) & (number < tokens)
                if new.any():
                    yield np.where(new, column, -1)

    def _calls(self, prompts, lengths, tokens, seed, state) -> Iterator[tuple[jax.Array, np.ndarray]]:
        """What each program draws [steps b], and how many new tokens a row had before each; below 0 in its prompt."""
        rows, longest = len(prompts), int(lengths.max())
        given = np.full((longest + STEPS, rows), -1, np.int32)  # -1: what the step before has drawn
        seen = np.zeros((rows, self.model.vocabulary_size), bool)
        for row, prompt in enumerate(prompts):
            given[: len(prompt), row] = prompt
            seen[row, prompt] = True
        starts, whole = state is None, self._reader.whole_blocks(int(lengths.min()))
        state = self._reader(given[:whole].T, self.model.block, self._reader.begin(rows, state), starts)
        state = self._reader.for_decoding(state)
        begin = (np.zeros(rows, np.int32), seen)
        key, *begin = jax.device_put((jax.random.key(seed), *begin), self._reader.device)
        carry = (*begin, state)
        for at in range(whole, longest + tokens - 1, STEPS):
            here = np.arange(at, at + STEPS)[:, None]
            numbers, start = here + 1 - lengths, np.broadcast_to(starts & (here == 0), (STEPS, rows))
            columns = given[min(at, longest) :][:STEPS]
            carry, drawn = self._steps(self._reader.params, key, carry, (columns, numbers, start))
            yield drawn, numbers
