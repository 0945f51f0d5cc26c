"""A document of any length read in pieces, in constant memory: scored, gone on from, put away and taken up again.

stream = run.stream()
for piece in pieces:
    print(stream.feed(piece).bits_per_token)
stream.save("halfway.npz")          # and later, in another process: run.stream("halfway.npz")
print(stream.generate(200))
"""

import io
import json
import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from block_recurrent.data import files
from block_recurrent.data.encoding import Encoder
from block_recurrent.data.vocabulary import Vocabulary
from block_recurrent.errors import UserError

FORMAT = 1
LONGEST = 4096  # tokens at once


@dataclass(frozen=True)
class Scores:
    """What each token of a text cost; token i stands for the bytes offsets[i]:offsets[i + 1] of the document."""

    tokens: np.ndarray  # [n]
    bits: np.ndarray  # [n]; nan for a document's first token, which nothing predicts
    offsets: np.ndarray  # [n + 1]

    @property
    def bits_per_token(self) -> float:
        """The mean over the tokens that were predicted; nan if none was."""
        predicted = ~np.isnan(self.bits)
        return float(np.sum(self.bits[predicted]) / predicted.sum()) if predicted.any() else math.nan

    @property
    def bits_per_byte(self) -> float:
        predicted = ~np.isnan(self.bits)
        size = np.sum(np.diff(self.offsets)[predicted])
        return float(np.sum(self.bits[predicted]) / size) if size else math.nan

    def __len__(self) -> int:
        return len(self.tokens)

    def __add__(self, later: "Scores") -> "Scores":
        """The scores of two pieces, one after the other."""
        joined = (np.concatenate(pair) for pair in ((self.tokens, later.tokens), (self.bits, later.bits)))
        return Scores(*joined, np.concatenate([self.offsets, later.offsets[1:]]))


class Scorer:
    """A model's losses along one document, compiled for a few lengths and put together from them."""

    def __init__(self, model: nn.Module):
        self.model = model
        block = model.block
        eighths = [block // 8**i for i in range(8) if block % 8**i == 0]
        # Whole blocks first; then parts of one, so that no place inside a block is more than a few calls away.
        self.lengths = sorted({max(LONGEST // block, 1) * block, *eighths, 1}, reverse=True)

        def losses(params, tokens, state, start):
            losses, state = model.apply(
                {"params": params}, tokens[:, :-1], tokens[:, 1:], state, start, method="losses"
            )
            return losses[0], state

        self._losses: Callable = jax.jit(losses, donate_argnums=2)
        self.initial: Callable = jax.jit(lambda: model.initial_state(1))

    def __call__(self, params: Any, tokens: np.ndarray, state: Any, position: int) -> tuple[np.ndarray, Any]:
        """Nats of tokens[1:], each given all before it; `position` is that of tokens[0] in its document."""
        found, at, count = [], 0, len(tokens) - 1
        while at < count:
            inside = (position + at) % self.model.block
            room = min(count - at, self.model.block - inside if inside else count)
            length = next(length for length in self.lengths if length <= room)
            start = np.zeros((1, length), bool)
            start[0, 0] = position + at == 0
            losses, state = self._losses(params, tokens[None, at : at + length + 1], state, start)
            found.append(losses)
            at += length
            if len(found) > 2:  # fetched late, so that the device never waits
                found[-3] = np.asarray(found[-3])
        return np.concatenate([np.zeros(0, np.float32), *map(np.asarray, found)]), state


class Stream:
    """One document; what it remembers is the model's state, whatever the length. See the top of this file."""

    def __init__(
        self, scorer: Scorer, params: Any, vocabulary: Vocabulary, identity: dict, file: str | Path | None = None
    ):
        self.scorer, self.params, self.vocabulary, self.identity = scorer, params, vocabulary, identity
        self.state = scorer.initial()
        self.last = np.zeros(0, np.int32)  # the last token, which the model has not been given yet
        self.position = 0  # tokens so far
        self.offset = 0  # bytes so far
        self.encoder = Encoder(vocabulary)
        if file is not None:
            self._load(file)

    def feed(self, text: str | bytes | Sequence[int], last: bool = False) -> Scores:
        """Reads a piece, text or tokens, and scores what of it is complete; with the `last` piece, everything.

        Bytes are tokens at once; a word waits for the blank after it, SentencePiece for up to 64 KiB of text.
        """
        if isinstance(text, str | bytes):
            tokens, sizes = self.encoder.feed(text.encode() if isinstance(text, str) else text, last)
        else:
            before, sizes_before = self.encoder.feed(b"", last=True)
            tokens = np.concatenate([before, np.asarray(text, np.int32)])
            sizes = [len(self.vocabulary.token_bytes(int(token))) for token in np.asarray(text)]
            sizes = np.concatenate([sizes_before, np.asarray(sizes, np.int64)])
            check_tokens(tokens, self.scorer.model.vocabulary_size)
        joined = np.concatenate([self.last, tokens]).astype(np.int32)
        first = self.position - len(self.last)  # the position of joined[0]
        nats, self.state = self.scorer(self.params, joined, self.state, first)
        unpredicted = np.full(len(tokens) - len(nats), np.nan)
        offsets = np.cumsum([self.offset, *sizes])
        self.last, self.position, self.offset = joined[-1:], self.position + len(tokens), int(offsets[-1])
        return Scores(tokens, np.concatenate([unpredicted, nats / math.log(2)]), offsets)

    def flush(self) -> Scores:
        """Reads what was held back, as if the text ended here."""
        return self.feed(b"", last=True)

    def state_before_last(self) -> Any:
        """What a generator goes on from, given the last token; None if that is the first of its document."""
        if not len(self.last):
            raise UserError("the stream is empty: feed it something to go on from")
        return self.state if self.position > 1 else None

    def save(self, file: str | Path) -> None:
        """Puts the stream away: a NumPy archive, for the same run and step."""
        about = {
            "format": FORMAT,
            **self.identity,
            "last": self.last.tolist(),
            "position": self.position,
            "offset": self.offset,
            "held": self.encoder.held.hex(),
            "begun": self.encoder.begun,
        }
        arrays = {f"state_{i}": to_bytes(leaf) for i, leaf in enumerate(jax.tree.leaves(self.state))}
        content = io.BytesIO()
        np.savez(content, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
        files.write_bytes(str(file), content.getvalue())

    def _load(self, file: str | Path) -> None:
        shapes = jax.tree.leaves(jax.eval_shape(self.scorer.initial))
        try:
            with np.load(io.BytesIO(files.read_bytes(str(file))), allow_pickle=False) as saved:
                about = json.loads(saved["about"].tobytes())
                leaves = [from_bytes(saved[f"state_{i}"], shape) for i, shape in enumerate(shapes)]
            differs = next((name for name, value in self.identity.items() if about[name] != value), None)
            if about["format"] == FORMAT and differs is None:
                self.last, self.position = np.asarray(about["last"], np.int32), int(about["position"])
                self.offset = int(about["offset"])
                self.encoder = Encoder(self.vocabulary, bytes.fromhex(about["held"]), bool(about["begun"]))
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(f"{file} is no saved stream ({error})") from error
        if differs or about["format"] != FORMAT:
            raise UserError(f"{file} was saved by another {differs or 'version'}: it goes on only where it came from")
        self.state = jax.tree.unflatten(jax.tree.structure(self.state), map(jnp.asarray, leaves))


def check_tokens(tokens: np.ndarray, size: int) -> None:
    if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < size):
        raise UserError(f"tokens from {tokens.min()} to {tokens.max()}: the vocabulary has 0 to {size - 1}")


def to_bytes(leaf: jax.Array) -> np.ndarray:
    """An array of plain bytes [... itemsize]: NumPy's files know no bfloat16."""
    array = np.ascontiguousarray(leaf)
    return np.frombuffer(array.tobytes(), np.uint8).reshape(*array.shape, array.dtype.itemsize)


def from_bytes(content: np.ndarray, like: jax.ShapeDtypeStruct) -> np.ndarray:
    if content.dtype != np.uint8 or content.shape != (*like.shape, like.dtype.itemsize):
        raise ValueError(f"a state of shape {content.shape[:-1]} instead of {like.shape}")
    return np.frombuffer(content.tobytes(), like.dtype).reshape(like.shape)
