"""A split measured document by document: by position, by kind of word, and how sure the figures are.

found = measure(evaluator, params, split, vocabulary)
found.score.bits_per_token, found.interval()        # intervals are from the bootstrap over documents
found.positions.bits_per_token                      # one figure for each stretch of the document
difference(found, other)                            # two runs on the same documents
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from block_recurrent.data.rows import RowStream, check_ids
from block_recurrent.data.store import Mixture, Split
from block_recurrent.data.vocabulary import Vocabulary
from block_recurrent.errors import UserError
from block_recurrent.inference.evaluation import Evaluator, Score
from block_recurrent.inference.statistics import paired_interval, ratio_interval

Interval = tuple[float, float] | None  # None where there are too few documents

WORD = re.compile(rb"[\w\x80-\xff]{3,}")  # words and identifiers, in any script
WORDS = ("rare words, first time", "rare words, again", "everything else")
WITHOUT_WORDS = ("python_stdlib", "github", "arxiv")  # tasks, by how their names begin
BOOKS = ("pg19", "gutenberg")
FEWEST = 10  # documents, below which no word can be called rare


@dataclass(frozen=True)
class Breakdown:
    """Losses sorted into classes and summed over each document."""

    labels: tuple[str, ...]
    nats: np.ndarray  # [documents classes]
    tokens: np.ndarray  # [documents classes]

    @property
    def bits_per_token(self) -> np.ndarray:
        """[classes]; nan for a class without tokens."""
        tokens = self.tokens.sum(axis=0)
        return np.divide(bits(self.nats.sum(axis=0)), tokens, out=np.full(len(tokens), np.nan), where=tokens > 0)

    def intervals(self) -> list[Interval]:
        return [interval_of(self.nats[:, i], self.tokens[:, i]) for i in range(len(self.labels))]

    def to_json(self) -> list[dict]:
        figures = zip(self.labels, self.tokens.sum(axis=0), self.bits_per_token, self.intervals(), strict=True)
        return [
            {"of": label, "tokens": int(tokens), "bits_per_token": float(found), "interval": interval}
            for label, tokens, found, interval in figures
            if tokens
        ]


@dataclass(frozen=True)
class Measured:
    """What was found, in total and document by document, in the split's order."""

    score: Score
    names: tuple[str, ...]
    nats: np.ndarray  # [documents]
    tokens: np.ndarray  # [documents] that were predicted
    bytes: np.ndarray  # [documents]
    positions: Breakdown  # by how far into its document a token is
    words: Breakdown | None  # rare words, when they come and when they come again; None for few documents

    def interval(self) -> Interval:
        """Where bits per token would lie with other documents of this kind, with a probability of 95 %."""
        return interval_of(self.nats, self.tokens)

    def to_json(self) -> dict:
        per_document = {"name": self.names, "nats": self.nats, "tokens": self.tokens, "bytes": self.bytes}
        return {
            **self.score.to_json(),
            "bits_per_token_interval": self.interval(),
            "by_position": self.positions.to_json(),
            "by_word": self.words.to_json() if self.words else None,
            "per_document": {name: np.asarray(values).tolist() for name, values in per_document.items()},
        }


def difference(a: Measured, b: Measured) -> tuple[float, Interval]:
    """Bits per token of `a` less those of `b` on the same documents, and the interval of that difference."""
    if a.names != b.names or not np.array_equal(a.tokens, b.tokens):
        raise UserError("the two were not measured on the same documents and tokens: only then can they be paired")
    between = paired_interval(a.nats, b.nats, a.tokens)
    return float(bits(a.nats.sum() - b.nats.sum()) / a.tokens.sum()), between and tuple(map(bits, between))


def bits(nats):
    return nats / math.log(2)


def interval_of(nats: np.ndarray, tokens: np.ndarray) -> Interval:
    """Of bits per token, over the documents that have any."""
    found = ratio_interval(nats[tokens > 0], tokens[tokens > 0])
    return found and tuple(map(bits, found))


def measure(
    evaluator: Evaluator,
    params,
    split: Split | Mixture,
    vocabulary: Vocabulary,
    names: Sequence[str] | None = None,
    progress: Callable = lambda done, total: None,
    task: str | None = None,
) -> Measured:
    """Evaluates a split, of the store that `task` has made, and keeps what each document gave."""
    stream = evaluator.stream(split)
    texts = Texts(stream, vocabulary)
    count, edges = len(texts), position_edges(evaluator.model.block, texts.longest)
    kinds = kinds_of_words(texts) if count >= FEWEST and vocabulary.is_text else None
    by_position = np.zeros((2, count, len(edges)))  # nats and tokens
    by_word = np.zeros((2, count, len(WORDS)))
    done, words_of = 0, {}
    for span, losses in evaluator.losses(params, stream):
        document = texts.number(span.part, span.document)
        inputs = np.arange(span.offset, span.offset + span.count)
        by_position[:, document] += sums(np.searchsorted(edges, inputs, side="right") - 1, losses, len(edges))
        if kinds is not None:
            if span.offset == 0:
                words_of[document] = kinds(texts.tokens(document))
            of_targets = words_of[document][inputs + 1]
            by_word[:, document] += sums(of_targets, losses, len(WORDS))
            if span.offset + span.count + 1 == len(words_of[document]):
                del words_of[document]
        done += span.count
        progress(done, stream.predictions)
    nats, tokens = by_position.sum(axis=2)
    labels = tuple(f"{a:,} to {b:,}" for a, b in zip(edges, [*edges[1:], texts.longest], strict=True))
    return Measured(
        Score(
            nats=float(nats.sum()),
            tokens=int(tokens.sum()),
            documents=count,
            bytes_per_token=float(texts.bytes.sum() / tokens.sum()),
            words_per_token=float(texts.words.sum() / tokens.sum()),
            of_words=has_words(vocabulary, task),
        ),
        tuple(str(names[i]) if names else str(i) for i in texts.places),
        nats,
        tokens.astype(np.int64),
        texts.bytes,
        Breakdown(labels, by_position[0], by_position[1].astype(np.int64)),
        Breakdown(WORDS, by_word[0], by_word[1].astype(np.int64)) if kinds else None,
    )


def has_words(vocabulary: Vocabulary, task: str | None) -> bool:
    """Whether a figure for each word means anything: not in code and formulas, and for bytes in books alone."""
    if not vocabulary.is_text or (task or "").startswith(WITHOUT_WORDS):
        return False
    return vocabulary.kind != "bytes" or (task or "").startswith(BOOKS)


def sums(classes: np.ndarray, losses: np.ndarray, count: int) -> np.ndarray:
    """Sum and number of the losses of each class, [2 count]."""
    return np.stack([np.bincount(classes, losses, count), np.bincount(classes, minlength=count)])


def position_edges(block: int, longest: int) -> np.ndarray:
    """Where stretches of a document begin: the first block, and then each twice as far as the one before."""
    return np.array([0, *(block << i for i in range(64) if block << i < longest)])


class Texts:
    """The documents of a stream that is read once, numbered in the order of their splits."""

    def __init__(self, stream: RowStream, vocabulary: Vocabulary | None = None):
        self.parts, self.vocabulary = stream.parts, vocabulary
        self.first = np.cumsum([0, *map(len, self.parts)])  # number of each part's first document
        splits = [part.split for part in self.parts]
        before = np.cumsum([0, *(len(split.lengths) for split in splits)])
        self.places = np.concatenate([part.whole + at for part, at in zip(self.parts, before, strict=False)])
        self.bytes = np.concatenate([part.split.bytes[part.whole] for part in self.parts])
        self.words = np.concatenate([part.split.words[part.whole] for part in self.parts])
        self.longest = max(int(np.max(part.end - part.begin)) for part in self.parts)

    def __len__(self) -> int:
        return int(self.first[-1])

    def number(self, part: int, place: int) -> int:
        """Of the document at a place of its part's sequence."""
        return int(self.first[part] + self.parts[part].order(0)[place])

    def tokens(self, number: int) -> np.ndarray:
        part = int(np.searchsorted(self.first, number, side="right")) - 1
        documents, at = self.parts[part], number - self.first[part]
        tokens = documents.read[int(documents.begin[at]) : int(documents.end[at]) + 1]
        check_ids(tokens, documents.split.ids)
        return tokens


def kinds_of_words(texts: Texts) -> Callable[[np.ndarray], np.ndarray]:
    """A function that says of each token of a document which of WORDS it belongs to.

    A word is rare that is in one document, or in two of every hundred at most: a name, an identifier. When it comes
    again in its document, a model that remembers knows it.
    """
    token_bytes = [texts.vocabulary.token_bytes(token) for token in range(texts.vocabulary.size)]
    sizes = np.array([len(content) for content in token_bytes])
    seen_in = Counter()
    for number in range(len(texts)):
        text = b"".join(token_bytes[token] for token in texts.tokens(number))
        seen_in.update(set(WORD.findall(text)))
    most = max(len(texts) // 50, 1)

    def kinds(tokens: np.ndarray) -> np.ndarray:
        text = b"".join(token_bytes[token] for token in tokens)
        kind_of_byte = np.full(len(text) + 1, 2, np.uint8)  # one more, for tokens without text at the end
        before = set()
        for found in WORD.finditer(text):
            if seen_in[found[0]] <= most:
                kind_of_byte[found.start() : found.end()] = found[0] in before
                before.add(found[0])
        # A token with a blank before its word is of the kind of its last byte.
        ends = np.cumsum(sizes[tokens])
        return kind_of_byte[np.where(sizes[tokens] > 0, ends - 1, len(text))]

    return kinds
