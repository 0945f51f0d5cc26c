"""Documents with labels, and positions that are records: the row stream and the store, also one by a stranger."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from block_recurrent.data import building, pool
from block_recurrent.data.documents import Document, Unit
from block_recurrent.data.mixing import mix
from block_recurrent.data.rows import Cursor, RowStream
from block_recurrent.data.signals import NoteVocabulary, PixelVocabulary
from block_recurrent.data.store import Mixture, Split, open_store
from block_recurrent.data.vocabulary import ByteVocabulary
from block_recurrent.errors import UserError
from block_recurrent.stores_printed import print_statistics

LENGTHS = [9, 1, 30, 2, 17, 4, 5, 13, 25, 0, 8]


def split_of(lengths=LENGTHS) -> Split:
    """Documents whose tokens are all different; the label of the i-th is i, so that each can be recognised."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    counts = np.zeros(len(lengths), np.int64)
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint16)
    return Split(tokens, offsets, counts, counts, labels=np.arange(len(lengths)))


def records_of(split: Split) -> Split:
    """The same with a record for every token: its number in two bytes, and a third that is 7."""
    high, low = np.divmod(split.tokens, 256)
    return replace(split, tokens=np.stack([high, low, np.full_like(low, 7)], axis=1).astype(np.uint8), labels=None)


SPLIT = split_of()


def stream(**changes) -> RowStream:
    return RowStream(**{"split": SPLIT, "rows": 3, "segment": 12, "block": 4, "seed": 7, **changes})


def told(batch) -> list[tuple[int, int]]:
    """(input, label) wherever a batch has a target."""
    here = batch["weights"] > 0
    return list(zip(batch["inputs"][here].tolist(), batch["targets"][here].tolist(), strict=True))


EXPECTED = sorted((int(end), i) for i, end in enumerate(SPLIT.offsets[1:]) if LENGTHS[i])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("segment", [4, 12, 40])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_every_label_is_told_once_an_epoch_at_the_last_token(shuffle, segment, rows):
    whole = stream(shuffle=shuffle, segment=segment, rows=rows, epochs=1)
    batches = list(whole)
    assert sorted(pair for batch in batches for pair in told(batch)) == EXPECTED
    assert whole.predictions == len(EXPECTED)
    for batch in batches:
        assert set(np.unique(batch["weights"])) <= {0.0, 1.0} and not batch["targets"][batch["weights"] == 0].any()


@pytest.mark.parametrize("contiguous", [False, True])
def test_all_tokens_are_inputs_and_no_labelled_document_is_cut(contiguous):
    batches = list(stream(split=replace(SPLIT, contiguous=contiguous), rows=20, epochs=1))
    inputs = np.concatenate([batch["inputs"] for batch in batches])
    assert sorted(inputs[inputs > 0].tolist()) == SPLIT.tokens.tolist()
    starts = np.concatenate([batch["start"] for batch in batches])
    assert sorted(inputs[starts].tolist()) == sorted(
        int(SPLIT.offsets[i]) + 1 for i, length in enumerate(LENGTHS) if length
    )


def test_spans_say_which_inputs_are_of_which_document():
    whole, cursor = stream(epochs=1), stream().begin()
    while not whole.finished(cursor):
        batch, after = whole.read(cursor)
        covered = np.zeros((3, 12), bool)
        for span in whole.spans(cursor):
            first = whole.parts[0].bounds(span.document)[0] + span.offset + 1
            inputs = batch["inputs"][span.row, span.at : span.at + span.count]
            assert inputs.tolist() == list(range(first, first + span.count))
            covered[span.row, span.at : span.at + span.count] = True
        np.testing.assert_array_equal(covered, batch["inputs"] > 0)
        cursor = after


RECORDS = records_of(SPLIT)


@pytest.mark.parametrize("split", [SPLIT, RECORDS, replace(RECORDS, labels=SPLIT.labels)], ids=["l", "r", "lr"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_resumed_before_every_batch_hosts_together_read_what_one_reads(split, hosts):
    whole, cursor = stream(split=split, rows=4, epochs=2), stream(rows=4).begin()
    while not whole.finished(cursor):
        batch, after = whole.read(cursor)
        restored = Cursor(**json.loads(json.dumps(asdict(cursor))))
        local = [tuple(range(host * 4 // hosts, (host + 1) * 4 // hosts)) for host in range(hosts)]
        shares = [stream(split=split, rows=4, epochs=2, local=rows).read(restored) for rows in local]
        for name in batch:
            np.testing.assert_array_equal(np.concatenate([share[name] for share, _ in shares]), batch[name])
        assert all(their == after for _, their in shares)
        cursor = after


def test_records_are_read_as_tokens_are():
    plain = stream(split=replace(SPLIT, labels=None), epochs=1)
    for tokens, records in zip(plain, stream(split=RECORDS, epochs=1), strict=True):
        np.testing.assert_array_equal(tokens["weights"], records["weights"])
        np.testing.assert_array_equal(tokens["start"], records["start"])
        for name in ("inputs", "targets"):
            assert records[name].shape == (3, 12, 3) and records[name].dtype == np.uint8
            high, low, seven = np.moveaxis(records[name].astype(int), -1, 0)
            np.testing.assert_array_equal(256 * high + low, tokens[name])
            np.testing.assert_array_equal(seven, 7 * tokens["weights"])
    assert plain.predictions == stream(split=RECORDS).predictions == sum(max(length - 1, 0) for length in LENGTHS)


def test_records_with_labels_have_labels_for_targets():
    batches = list(stream(split=replace(RECORDS, labels=SPLIT.labels), epochs=1))
    assert all(batch["targets"].shape == (3, 12) and batch["targets"].dtype == np.int32 for batch in batches)
    labels = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches])
    assert sorted(labels.tolist()) == [i for i, length in enumerate(LENGTHS) if length]


def test_mixtures_of_what_is_not_alike_are_refused():
    with pytest.raises(UserError, match="with labels and documents without"):
        stream(split=Mixture(((SPLIT, 1.0), (replace(SPLIT, labels=None), 1.0))))
    with pytest.raises(UserError, match="positions are not alike"):
        stream(split=Mixture(((replace(SPLIT, labels=None), 1.0), (RECORDS, 1.0))))


def test_a_mixture_of_labelled_documents_tells_every_label():
    other = replace(SPLIT, labels=SPLIT.labels + 100)
    batches = list(stream(split=Mixture(((SPLIT, 1.0), (other, 2.0))), epochs=1))
    expected = EXPECTED + [(last, label + 100) for last, label in EXPECTED]
    assert sorted(pair for batch in batches for pair in told(batch)) == sorted(expected)


def test_labelled_documents_without_a_token_are_an_empty_corpus():
    with pytest.raises(UserError, match="corpus is empty: no document has a token"):
        stream(split=split_of([0, 0]))
    assert stream(split=split_of([1])).predictions == 1


# The store.


@dataclass(frozen=True)
class Numbers:
    """Documents of made-up bytes in three units, with labels or without."""

    labels: tuple[str, ...] = ("even", "odd")
    wrong: int | None = None
    name = "numbers"
    contiguous = False

    def units(self):
        return [Unit((str(i),), "") for i in range(3)]

    def read(self, unit, dropped):
        for i in range(int(unit.places[0]), 30, 3):
            label = (i % 2 if self.wrong is None else self.wrong) if self.labels else None
            yield Document(f"{i:02d}", bytes([i]) * 11 * (i % 5), label=label)


def built(tmp_path, source, vocabulary, name="store", **changes):
    work = tmp_path / f"{name}.work"
    recipe = building.Recipe(name, source, tuple(source.units()), vocabulary, str(work), str(work / "store"), **changes)
    return pool.build(recipe, {"fingerprint": "", "published": {}}, str(tmp_path / name), 1)


def test_a_store_keeps_the_label_of_every_document(tmp_path):
    store = built(tmp_path, Numbers(), PixelVocabulary(), shard_tokens=100)
    manifest = store.manifest
    assert manifest["labels"] == ["even", "odd"] and manifest["dtype"] == "<u2" and "record" not in manifest
    assert manifest["dropped"]["empty"]["count"] == 6
    seen = {}
    for name, entry in manifest["splits"].items():
        split = store.split(name)
        assert entry["predictions"] == entry["documents"] == sum(entry["labels"])
        assert np.bincount(split.labels, minlength=2).tolist() == entry["labels"]
        for i, document in enumerate(store.names(name)):
            number = int(document)
            assert split.tokens[split.offsets[i] : split.offsets[i + 1]].tolist() == [number] * (11 * (number % 5))
            seen[number] = int(split.labels[i])
    assert seen == {i: i % 2 for i in range(30) if i % 5}
    assert len(manifest["splits"]["train"]["shards"]) > 5
    batches = list(RowStream(store.split("train"), 4, 16, 8, epochs=1))
    assert sum(batch["weights"].sum() for batch in batches) == manifest["splits"]["train"]["documents"]


def test_labels_decide_what_a_run_depends_on(tmp_path):
    stores = [
        built(tmp_path, source, PixelVocabulary(), name)
        for name, source in (("a", Numbers()), ("b", Numbers(wrong=1)), ("c", Numbers(labels=("x", "y"))))
    ]
    assert len({store.fingerprint() for store in stores}) == 3


@pytest.mark.parametrize("wrong", [2, -1])
def test_a_label_of_no_class_is_refused(tmp_path, wrong):
    with pytest.raises(UserError, match="which is of no class"):
        built(tmp_path, Numbers(wrong=wrong), PixelVocabulary())


def test_a_store_of_records(tmp_path):
    store = built(tmp_path, Numbers(labels=()), NoteVocabulary(), shard_tokens=5)
    manifest, split = store.manifest, store.split("train")
    assert (manifest["record"], manifest["dtype"]) == (11, "|u1") and "labels" not in manifest
    assert split.labels is None and split.tokens.shape == (int(split.offsets[-1]), 11)
    for i, document in enumerate(store.names("train")):
        frames = split.tokens[split.offsets[i] : split.offsets[i + 1]]
        assert (
            frames.shape == (int(document) % 5, 11) and frames.dtype == np.uint8 and set(frames.flat) == {int(document)}
        )
    whole = split.tokens[0 : len(split.tokens)]
    assert whole.shape == split.tokens.shape and split.tokens[3:3].shape == (0, 11)
    assert manifest["splits"]["train"]["tokens"] == sum(manifest["splits"]["train"]["shards"]) == len(whole)
    assert all(batch["inputs"].shape == (2, 8, 11) for batch in RowStream(split, 2, 8, 4, epochs=1))


@pytest.mark.parametrize("vocabulary", [PixelVocabulary(), NoteVocabulary()])
def test_stores_of_what_is_no_text_can_be_mixed_but_labels_must_agree(tmp_path, vocabulary):
    for name, labels in (("a", ("even", "odd")), ("b", ("even", "odd")), ("c", ("x", "y")), ("d", ())):
        built(tmp_path, Numbers(labels=labels), vocabulary, name)
    mixed = mix(f"{tmp_path}/a=1,{tmp_path}/b=2", str(tmp_path / "mixed"))
    batches = list(RowStream(mixed.split("train"), 2, 16, 8, epochs=1))
    entry = mixed.manifest["splits"]["train"]
    assert sum(batch["weights"].sum() for batch in batches) == entry["predictions"] == sum(entry["labels"])
    for other in "cd":
        with pytest.raises(UserError, match="do not have the same labels"):
            mix(f"{tmp_path}/a=1,{tmp_path}/{other}=2", str(tmp_path / "other"))
    manifest = {key: value for key, value in mixed.manifest.items() if key != "labels"}
    Path(mixed.folder, "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="has other labels"):
        open_store(mixed.folder).split("train")


def test_a_store_in_a_bucket(tmp_path):
    import fsspec

    for name, source, vocabulary in (("r", Numbers(labels=()), NoteVocabulary()), ("l", Numbers(), PixelVocabulary())):
        here = built(tmp_path, source, vocabulary, name, shard_tokens=40)
        pool.upload(here.folder, f"memory://bucket/{name}")
        there = open_store(f"memory://bucket/{name}")
        options = {"rows": 2, "segment": 16, "block": 8, "epochs": 1}
        for batch, other in zip(*(RowStream(store.split("train"), **options) for store in (here, there)), strict=True):
            for key in batch:
                np.testing.assert_array_equal(batch[key], other[key])
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    "change",
    [
        {"labels": []},
        {"labels": None},
        {"labels": "even"},
        {"labels": ["even", "even"]},
        {"labels": ["even", 1]},
        {"labels": ["even", ""]},
        {"labels": ["even", "\x1b[31modd"]},
        {"labels": ["even"]},  # and a document of the second class
        {"record": 1},
        {"record": 11},
        {"record": True},
        {"dtype": "|u1"},
        {"dtype": "|O"},
    ],
)
def test_a_manifest_of_labels_that_prepare_would_not_write_is_refused(tmp_path, change):
    store = built(tmp_path, Numbers(), PixelVocabulary())
    Path(store.folder, "manifest.json").write_text(json.dumps({**store.manifest, **change}))
    with pytest.raises(UserError):
        open_store(store.folder).split("train")


@pytest.mark.parametrize(
    "change", [{"record": None}, {"record": 10}, {"record": 11.0}, {"record": "11"}, {"dtype": "<u2"}, {"dtype": "|O"}]
)
def test_a_manifest_of_records_that_prepare_would_not_write_is_refused(tmp_path, change):
    store = built(tmp_path, Numbers(labels=()), NoteVocabulary())
    Path(store.folder, "manifest.json").write_text(json.dumps({**store.manifest, **change}))
    with pytest.raises(UserError):
        open_store(store.folder).split("train")


@pytest.mark.parametrize("counts", [None, [], [1], [1, -1], [1, "2"], {"a": 1, "b": 2}])
def test_counts_of_labels_that_prepare_would_not_write_are_refused(tmp_path, counts):
    store = built(tmp_path, Numbers(), PixelVocabulary())
    store.manifest["splits"]["train"]["labels"] = counts
    Path(store.folder, "manifest.json").write_text(json.dumps(store.manifest))
    with pytest.raises(UserError, match="cannot be read"):
        open_store(store.folder)


def test_a_label_may_look_like_markup(tmp_path, capsys):
    print_statistics(built(tmp_path, Numbers(labels=("[/b]", "[red]x")), PixelVocabulary()))
    told = capsys.readouterr().out
    assert "[/b]" in told and "[red]x" in told


def test_images_of_any_size_are_drawn():
    draw = PixelVocabulary().drawn
    assert list(draw(np.array([0, 255, 128, 999]))) == [" @", "+@"]
    assert list(draw(np.array([255, 0, 255]))) == ["@ @"] and list(draw(np.zeros(0))) == []


def test_a_shard_that_is_no_whole_records_is_refused(tmp_path):
    store = built(tmp_path, Numbers(labels=()), NoteVocabulary())
    with open(f"{store.folder}/train-00000-of-00001.tokens", "ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="is damaged"):
        open_store(store.folder).split("train")


@pytest.mark.parametrize(
    "labels",
    [
        lambda labels: labels[:-1],
        lambda labels: labels + 1,
        lambda labels: labels - 1,
        lambda labels: labels.astype(float),
        lambda labels: np.array([print] * len(labels), object),
        lambda labels: None,
    ],
)
def test_labels_of_an_index_that_prepare_would_not_write_are_refused(tmp_path, labels):
    store = built(tmp_path, Numbers(), PixelVocabulary())
    place = f"{store.folder}/train.index.npz"
    index = dict(np.load(place))
    changed = labels(index.pop("labels"))
    np.savez(place, **index, **({} if changed is None else {"labels": changed}))
    with pytest.raises(UserError, match="is damaged"):
        open_store(store.folder).split("train")


def test_a_store_of_text_has_neither_labels_nor_records(tmp_path):
    store = built(tmp_path, Numbers(labels=()), ByteVocabulary())
    assert not {"labels", "record"} & set(store.manifest) and "labels" not in store.manifest["splits"]["train"]
    assert "labels" not in np.load(f"{store.folder}/train.index.npz") and store.split("train").labels is None
