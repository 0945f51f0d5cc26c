"""What a store holds: its splits, how it differs from the published corpus, a document as the model sees it."""

from collections.abc import Iterator

import numpy as np

from block_recurrent.data.documents import SPLITS
from block_recurrent.data.signals import PixelVocabulary
from block_recurrent.data.store import Split, Store
from block_recurrent.data.vocabulary import Vocabulary
from block_recurrent.errors import UserError

SHOWN = 12  # of the documents whose text is in two splits
SEGMENT = 4096  # tokens, of the papers' long documents
QUANTILES = {
    "shortest document": 0.0,
    "10 % are shorter than": 0.1,
    "median": 0.5,
    "90 % are shorter than": 0.9,
    "longest": 1.0,
}


def statistics(store: Store) -> dict[str, list[str]]:
    """The rows of the table: a measure, and its value in each split."""
    columns, unknown = [], any(entry["unknown"] for entry in store.manifest["splits"].values())
    is_text, positions = store.vocabulary.is_text, store.vocabulary.positions
    for name, entry in store.manifest["splits"].items():
        lengths = np.concatenate([part.lengths for part, _ in store.split(name).parts]) if store.has(name) else [0]
        quantiles = np.quantile(lengths, list(QUANTILES.values()))
        columns.append(
            {
                "documents": f"{entry['documents']:,}",
                **{f"  {label}": f"{count:,}" for label, count in counted_labels(store, entry).items()},
                positions: f"{entry['tokens']:,}",
                **({key: f"{entry[key]:,}" for key in ("bytes", "words")} if is_text else {}),
                **({"unknown": f"{entry['unknown']:,}"} if unknown else {}),
                **({"bytes per token": bytes_per_token(entry)} if is_text else {}),
                **{key: f"{round(length):,}" for key, length in zip(QUANTILES, quantiles, strict=True)},
            }
        )
    return {key: [column[key] for column in columns] for key in columns[0]}


def counted_labels(store: Store, entry: dict) -> dict[str, int]:
    """How many of a split's documents are of each class."""
    return dict(zip(store.manifest.get("labels", []), entry.get("labels", []), strict=True))


def bytes_per_token(entry: dict) -> str:
    """Of the tokens after each document's first, which is the one that `bytes` leave out."""
    return f"{entry['bytes'] / max(entry['tokens'] - entry['documents'], 1):.2f}"


def mismatches(store: Store) -> Iterator[str]:
    """Where a store differs from the counts that its corpus was published with, one line each."""
    for measure, counts in store.manifest.get("published", {}).items():
        for split, published in counts.items():
            if measure == "vocabulary":
                found, what = store.manifest["vocabulary"]["size"], "the vocabulary has"
            else:
                found, what = store.manifest["splits"][split][measure], f"{split} has"
            if found != published:
                unit = "entries" if measure == "vocabulary" else measure
                yield f"{what} {found:,} {unit}, published are {published:,}"


def arranged(store: Store) -> Iterator[str]:
    """How a person's own texts came into splits, and which texts are in two of them, one line each."""
    found = store.manifest.get("arranged")
    if found is not None:
        if found["by"] == "cut":
            yield "one text: its last tenth is held out, 5 % as validation and 5 % as test"
        for split, entry in found["files"].items():
            count = entry["count"]
            yield f"{split} by {'its name' if count == 1 else 'their names'}: {listed(entry['examples'], count)}"
        if found["by"] == "hash":
            others = "the other documents" if found["files"] else "documents"
            by_hash = [split for split in SPLITS[1:] if split not in found["files"] and store.has(split)]
            yield f"{others}: {'into splits by a hash of their names' if by_hash else 'train'}"
            for split in by_hash:
                names = store.document_names(split)
                yield f"{split}: {listed(names[:SHOWN], len(names))}"
    for where, entry in store.manifest.get("identical", {}).items():
        split, _, other = where.partition(" in ")
        pairs, are = listed(entry["examples"][:SHOWN], entry["count"]), "is" if entry["count"] == 1 else "are"
        yield f"identical: {entry['count']:,} of {split} {are} also in {other} ({pairs})"


def listed(names: list[str], count: int) -> str:
    return f"{', '.join(names)}{f', ... ({count:,})' if count > len(names) else ''}"


def warnings(store: Store) -> Iterator[str]:
    """What may deceive in the splits of a store, above all of a person's own texts, one line each."""
    if not {"identical", "mixture"} & set(store.manifest):
        yield (
            "an earlier version made this, which did not look for the same text in two splits, nor for texts that "
            "differ in white space alone: --overwrite makes it anew"
        )
    if "arranged" not in store.manifest:
        return
    if entry := store.manifest["arranged"].get("passed_over"):
        yield (
            "folders called train, valid or test say a split at the top, or where every file is in one, and test_data "
            f"does beside a train_data; here they do not: {listed(entry['examples'], entry['count'])}"
        )
    train = store.manifest["splits"]["train"]["tokens"]
    for name in SPLITS[1:]:
        tokens = store.manifest["splits"][name]["tokens"]
        if not store.has(name):
            yield f"there is no {name} text, so that nothing can be measured on it"
        elif tokens > train:
            yield f"{name} is larger than train: {tokens:,} tokens to {train:,}"
        elif tokens < SEGMENT:
            yield f"{name} has {tokens:,} tokens, less than a segment of {SEGMENT:,}: its figures say little"


def losses(vocabulary: Vocabulary) -> str | None:
    """What does not come back from the tokens of a SentencePiece vocabulary that was made for other text."""
    if vocabulary.kind != "sentencepiece":
        return None
    kinds = {"newlines": "a\nb", "tabs": "a\tb", "runs of blanks": "a  b", "capitals": "aB"}
    lost = [kind for kind, text in kinds.items() if vocabulary.decode(vocabulary.encode(text.encode())) != text]
    return ", ".join(lost) or None


def show(store: Store, split_name: str, document: int, segment: int, block: int, blocks: int | None) -> Iterator[str]:
    """The lines that print a document: every block's text under the range of its tokens, segments apart."""
    if "mixture" in store.manifest:
        members = ", ".join(member.folder for member, _ in store.members)
        raise UserError(f"{store.folder} is a mixture: show one of {members}")
    if block < 1 or segment < 1 or segment % block:
        raise UserError(f"--segment={segment} is not a multiple of --block={block}")
    split = store.split(split_name)
    count = len(split.lengths)
    if not 0 <= document < count:
        raise UserError(f"{split_name} of {store.folder} has documents 0 to {count - 1}: there is no {document}")
    name = next((name for i, name in enumerate(store.names(split_name)) if i == document), None)
    if name is None:
        raise UserError(f"{store.folder} is damaged ({split_name}.names.jsonl ends early): prepare it again")
    length = int(split.lengths[document])
    label = "" if split.labels is None else f", {store.manifest['labels'][split.labels[document]]}"
    yield f"document {document} of {split_name}: {name}{label}"
    segments, all_blocks, positions = -(-length // segment), -(-length // block), store.vocabulary.positions
    yield f"{length:,} {positions}: {segments:,} segments of {segment:,}, {all_blocks:,} blocks of {block:,}"
    if isinstance(store.vocabulary, PixelVocabulary):  # an image is seen whole or not at all
        begin = int(split.offsets[document])
        yield from store.vocabulary.drawn(split.tokens[begin : begin + length])
        return
    yield from show_blocks(store, split, int(split.offsets[document]), length, segment, block, blocks)


def show_blocks(
    store: Store, split: Split, begin: int, length: int, segment: int, block: int, blocks: int | None
) -> Iterator[str]:
    total, vocabulary = -(-length // block), store.vocabulary
    for i in range(total if blocks is None else min(blocks, total)):
        at = i * block
        end = min(at + block, length)
        if at % segment == 0:
            yield f"{f'== segment {at // segment} ':=<80}"
        padding = f", then {block - (end - at)} of padding" if end - at < block else ""
        yield f"{f'-- block {i}: {vocabulary.positions} {at:,} to {end - 1:,}{padding} ':-<80}"
        tokens = split.tokens[begin + at : begin + end]
        yield from vocabulary.drawn(tokens, at) if not vocabulary.is_text else [vocabulary.decode(tokens.tolist())]
    if blocks is not None and blocks < total:
        yield f"... {total - blocks:,} more blocks: --blocks=0 prints all"
