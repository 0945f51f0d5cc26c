"""Vocabularies made from a corpus: a SentencePiece model that keeps every character, and words by their counts."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from block_recurrent.data import files
from block_recurrent.data.vocabulary import LINE_ENDS, UNKNOWN, WordVocabulary, word_blocks
from block_recurrent.errors import UserError
from block_recurrent.quiet import quiet_stderr

STRETCH = 1 << 16  # bytes of lines that are sampled together
LONGEST = 4096  # characters of a line that SentencePiece gets at once


def count_words(texts: Iterable[bytes], line_ends: str = "eos") -> Counter:
    """How often each word occurs, line ends counted too. Counters of parts of a corpus can be added."""
    counts = Counter()
    for text in texts:
        for words in word_blocks(text, line_ends):
            counts.update(words)
    return counts


def word_vocabulary(counts: Counter, minimum: int = 1, unknown: str | None = None) -> WordVocabulary:
    """The words seen `minimum` times or more, by falling frequency and then by word.

    `unknown` is the word for all others where the corpus has none of its own: Billion Word is
    `word_vocabulary(count_words(texts, "sentences"), minimum=3, unknown="<UNK>")`.
    """
    if unknown is not None and unknown.encode() not in UNKNOWN:
        raise UserError(f"the unknown word is <unk> or <UNK>, not {unknown}")
    if not counts:
        raise UserError("there are no words to make a vocabulary of")
    specials = {*UNKNOWN, *LINE_ENDS.values()}
    kept = Counter({word: count for word, count in counts.items() if count >= minimum or word in specials})
    if unknown is not None:
        kept[unknown.encode()] += 0
    stands_in = next((word for word in UNKNOWN if word in kept), None)
    if stands_in is not None:
        kept[stands_in] += counts.total() - sum(counts[word] for word in kept)
    elif len(kept) < len(counts):
        raise UserError(f"words seen fewer than {minimum} times need a word to stand for them: unknown='<unk>'")
    return WordVocabulary(sorted(kept, key=lambda word: (-kept[word], word)))


def train_sentencepiece(
    texts: Iterable[bytes],
    size: int,
    output: str | Path,
    *,
    sample_bytes: int = 100_000_000,
    kind: str = "bpe",
    overwrite: bool = False,
) -> None:
    """Trains a model ("bpe" or "unigram") and writes it: the same texts give the same file.

    Its ids are seqio's (padding 0, end 1, unknown 2). Every text comes back from its tokens as it was, white space and
    all, but for the character U+2581: SentencePiece writes blanks with it, so it comes back as a blank.
    Of more than `sample_bytes` it reads an even sample, between half of that and all of it.
    """
    if kind not in ("bpe", "unigram"):
        raise UserError(f'a SentencePiece model is "bpe" or "unigram", not {kind!r}')
    refuse_existing(output, overwrite)
    sample = even_sample(texts, sample_bytes)
    if not any(part.strip(b"\0\n") for part in sample):
        raise UserError("there is no text to train a vocabulary on")
    model = trained_model(sample, size, kind)
    files.write_bytes(str(output), model)


def refuse_existing(output: str | Path, overwrite: bool) -> None:
    if files.is_file(str(output)) and not overwrite:
        raise UserError(f"{output} exists already: choose another file, or --overwrite it")


def trained_model(sample: Iterable[bytes], size: int, kind: str) -> bytes:
    """The bytes of a model; sentencepiece's log is held back unless it fails for a reason we do not know."""
    import sentencepiece

    model, error = io.BytesIO(), None
    with quiet_stderr():
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=sentences(sample),
                model_writer=model,
                vocab_size=size,
                model_type=kind,
                pad_id=0,
                eos_id=1,
                unk_id=2,
                bos_id=-1,
                byte_fallback=True,
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                split_digits=True,
                user_defined_symbols=["\n", "\t"],
                max_sentence_length=4 * LONGEST,
                num_threads=16,  # whatever the machine has: the model holds this number, and its sums depend on it
            )
        except RuntimeError as trouble:
            error = size_error(str(trouble), size)
            if error is None:
                raise
    if error is not None:
        raise error
    return model.getvalue()


def size_error(message: str, size: int) -> UserError | None:
    """What sentencepiece means where the size is at fault."""
    if found := re.search(r"size too high .*<= (\d+)", message):
        return UserError(f"this text cannot fill a vocabulary of {size:,} pieces: the largest it can is {found[1]}")
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return UserError(f"a vocabulary of {size:,} pieces cannot hold this text's characters: it takes {found[1]}")
    return None


def sentences(sample: Iterable[bytes]) -> Iterator[str]:
    """Lines, long ones in parts; newlines are pieces of their own, and sentencepiece drops a line with a NUL."""
    for part in sample:
        for line in part.decode(errors="ignore").replace("\0", "").split("\n"):
            for start in range(0, len(line), LONGEST):
                yield line[start : start + LONGEST]


def even_sample(texts: Iterable[bytes], limit: int) -> list[bytes]:
    """Every stretch of lines of the texts, or every second, fourth, ... so that they are within `limit` bytes."""
    kept, held, stride = [], 0, 1
    for i, part in enumerate(stretches_of_lines(texts, max(1, min(STRETCH, limit // 128)))):
        if i % stride:
            continue
        kept.append(part)
        held += len(part)
        while held > limit and len(kept) > 1:
            kept, stride = kept[::2], 2 * stride
            held = sum(map(len, kept))
    return kept


def stretches_of_lines(texts: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Whole lines of a text until they have `size` bytes; a line that is much longer is cut."""
    for text in texts:
        start = 0
        while start < len(text):
            end = text.find(b"\n", start + size, start + 2 * size) + 1 or start + 2 * size
            yield text[start:end]
            start = end
