"""Preparing: sources, and a store that is either whole or not there."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from block_recurrent.data import files, sources
from block_recurrent.data.documents import SPLITS, Dropped
from block_recurrent.data.registry import TASKS
from block_recurrent.data.store import open_store, split_in_memory
from block_recurrent.data.text_files import TextFiles
from block_recurrent.data.vocabulary import vocabulary
from block_recurrent.errors import MISTAKE, UserError, run_command
from block_recurrent.prepare import main, prepare
from tests.data.conftest import TEXTS


def store_of(folder, **changes):
    return prepare(**{"task": "text_files", "input": str(folder), "output": folder.parent / "store", **changes})


def documents_in(store):
    """Every document of a store, decoded."""
    for name in store.manifest["splits"]:
        split = store.split(name)
        for i in range(len(split.offsets) - 1):
            yield store.vocabulary.decode(split.tokens[split.offsets[i] : split.offsets[i + 1]])


def test_every_file_is_one_document_of_one_split(folder):
    store, made = store_of(folder)
    assert made
    assert sorted(documents_in(store)) == sorted(TEXTS.values())
    splits = store.manifest["splits"]
    assert {name: entry["documents"] for name, entry in splits.items()} == {
        "train": 6,
        "validation": 1,
        "test": 1,
    }
    assert sum(entry["words"] for entry in splits.values()) == sum(len(text.split()) for text in TEXTS.values())
    # The first byte of a document is never predicted, so it does not count.
    assert sum(entry["bytes"] for entry in splits.values()) == sum(len(text.encode()) - 1 for text in TEXTS.values())


def test_preparing_again_finds_the_store_and_a_changed_file_is_noticed(folder):
    store_of(folder)
    assert store_of(folder)[1] is False
    (folder / "3.txt").write_text("other text")
    with pytest.raises(UserError, match="made from other files"):
        store_of(folder)
    store, made = store_of(folder, overwrite=True)
    assert made and "other text" in set(documents_in(store))


def test_overwrite_never_removes_what_is_not_a_store(folder):
    (folder.parent / "store").mkdir()
    (folder.parent / "store" / "precious").write_text("mine")
    with pytest.raises(UserError, match="no prepared store"):
        store_of(folder, overwrite=True)
    assert (folder.parent / "store" / "precious").exists()


@pytest.mark.parametrize("precious", [Path.mkdir, lambda path: path.symlink_to("/nowhere")])
def test_a_folder_of_links_or_folders_is_not_replaced(folder, precious):
    (folder.parent / "store").mkdir()
    precious(folder.parent / "store" / "precious")
    with pytest.raises(UserError, match="no prepared store"):
        store_of(folder)
    assert os.path.lexists(folder.parent / "store" / "precious")


def test_an_empty_folder_of_training_texts_is_refused(tmp_path):
    (tmp_path / "texts" / "train").mkdir(parents=True)
    with pytest.raises(UserError, match="no texts in"):
        store_of(tmp_path / "texts")


@pytest.mark.parametrize("content", ["", "just text"])
def test_a_vocabulary_that_is_no_model_is_refused(folder, tmp_path, content):
    (tmp_path / "vocabulary.model").write_text(content)
    with pytest.raises(UserError, match="cannot be read as a SentencePiece model"):
        store_of(folder, vocabulary=str(tmp_path / "vocabulary.model"))


def test_a_home_folder_is_known_by_its_sign(folder, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder)
    main(["--task=text_files", "--input=~/texts", "--output=~/store", "--workers=1"])
    main(["--mixture=~/store=1", "--output=~/mixed"])
    assert open_store(folder.parent / "store") and open_store(folder.parent / "mixed").split("train")
    assert not (folder / "~").exists()


def test_names_that_are_not_utf8(folder):
    (folder / os.fsdecode(b"\xff.txt")).write_text("good text")
    (folder / os.fsdecode(b"\xfe.txt")).write_bytes(b"bad\0text")
    output = folder.parent / os.fsdecode(b"store\xff")
    main(["--task=text_files", f"--input={folder}", f"--output={output}", "--workers=1"])
    store = open_store(output)
    assert "\\udcff.txt" in [name for split in store.manifest["splits"] for name in store.names(split)]
    (bad,) = store.manifest["dropped"]["NUL bytes"]["examples"]
    assert bad.endswith("\\udcfe.txt") and bad.encode()


def test_a_dollar_in_the_name_of_a_store_is_no_formula(folder):
    output = folder.parent / "cost$\\foo$"
    main(["--task=text_files", f"--input={folder}", f"--output={output}", "--workers=1"])
    assert (output / "lengths.png").is_file()


def test_own_splits_are_kept(tmp_path):
    for split in SPLITS:
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "a.txt").write_text(f"text of {split}")
    store, _ = store_of(tmp_path / "texts")
    assert list(documents_in(store)) == [f"text of {split}" for split in SPLITS]


@pytest.mark.parametrize("pattern", ["*.txt", "[0-3].txt"])
def test_globs(folder, pattern):
    source = TextFiles(str(folder / pattern))
    named = [document.name for unit in source.units() for document in source.read(unit, Dropped())]
    assert named == sorted(file.name for file in folder.glob(pattern))


def test_wildcards_follow_links_to_files_but_to_no_folder(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.txt").write_text("secret")
    (folder / "folder").symlink_to(tmp_path / "elsewhere")
    (folder / "link.txt").symlink_to(tmp_path / "elsewhere" / "secret.txt")
    for pattern in ("**", "**/*.txt", "*.txt"):
        source = TextFiles(str(folder / pattern))
        assert {Path(place).name for unit in source.units() for place in unit.places} == {*TEXTS, "link.txt"}
    assert TextFiles(str(folder / "folder" / "*.txt")).units(), "asked for by name"


def test_missing_files_and_empty_corpora_are_refused(tmp_path):
    with pytest.raises(UserError, match="no texts in"):
        TextFiles(str(tmp_path / "nothing" / "*.txt")).units()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.txt").touch()
    with pytest.raises(UserError, match=r"corpus is empty.*dropped: 1 empty"):
        store_of(tmp_path / "texts")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_split_without_anything_to_predict_is_empty(tmp_path):
    for split, text in (("train", "enough"), ("validation", "x"), ("test", "")):
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "a.txt").write_text(text)
    store, _ = store_of(tmp_path / "texts")
    assert store.has("train") and not store.has("validation") and not store.has("test")
    with pytest.raises(UserError, match=r"split 'test' of .* is empty"):
        store.split("test")


def test_a_store_of_sentencepiece_tokens(folder, sentencepiece_model):
    ours = vocabulary(sentencepiece_model)
    text = "The quick brown fox, 漢字.".encode()
    first = ours.token_bytes(int(ours.encode(text)[0])).strip()  # without the blank that the model puts before it
    assert split_in_memory([text], ours).bytes[0] == len(text) - len(first)
    store, _ = store_of(folder, vocabulary=str(sentencepiece_model))
    assert store.vocabulary.identity == ours.identity
    assert open_store(store.folder).manifest["vocabulary"]["size"] == ours.size


def test_a_damaged_store_is_refused(folder):
    store, _ = store_of(folder)
    with open(f"{store.folder}/train-00000-of-00001.tokens", "ab") as file:
        file.write(b"xx")
    with pytest.raises(UserError, match=r"is damaged \(train-00000-of-00001.tokens has \d+ tokens instead of"):
        open_store(store.folder).split("train")
    Path(store.folder, "manifest.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        open_store(store.folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(dtype="O"),
        lambda manifest: manifest.update(dtype="V0"),
        lambda manifest: manifest.update(splits=["train"]),
        lambda manifest: manifest.update(splits={"../train": manifest["splits"]["train"]}),
        lambda manifest: manifest.update(vocabulary=None),
        lambda manifest: manifest["splits"].update(train=None),
        lambda manifest: manifest["splits"]["train"].update(documents="6"),
        lambda manifest: manifest["splits"]["train"].update(shards=9),
        lambda manifest: manifest["splits"]["train"].update(shards=[-1]),
        lambda manifest: manifest["splits"]["train"].pop("predictions"),
        lambda manifest: manifest.update(mixture=[]),
        lambda manifest: manifest.update(mixture=[{"store": ".", "rate": -1, "splits": {}}]),
        lambda manifest: manifest.update(
            mixture=[
                {
                    "store": ".",
                    "rate": 1,
                    "splits": {name: entry["sha256"] for name, entry in manifest["splits"].items()},
                }
            ]
        ),
    ],
)
def test_a_manifest_that_prepare_would_not_write_is_refused(folder, change):
    store, _ = store_of(folder)
    change(store.manifest)
    Path(store.folder, "manifest.json").write_text(json.dumps(store.manifest))
    with pytest.raises(UserError):
        open_store(store.folder).split("train")


@pytest.mark.parametrize(
    "change",
    [
        lambda index: {**index, "offsets": np.array([print], object)},
        lambda index: {**index, "offsets": index["offsets"][[0, 2, 1, *range(3, len(index["offsets"]))]]},
        lambda index: {**index, "offsets": index["offsets"].astype(float)},
        lambda index: {**index, "bytes": index["bytes"][:1]},
        lambda index: {key: values for key, values in index.items() if key != "words"},
    ],
)
def test_an_index_that_prepare_would_not_write_is_refused(folder, change):
    store, _ = store_of(folder)
    place = f"{store.folder}/train.index.npz"
    np.savez(place, **change(dict(np.load(place))))
    with pytest.raises(UserError, match="is damaged"):
        open_store(store.folder).split("train")


@pytest.mark.parametrize("name", ["manifest.json", "train.index.npz", "train.names.jsonl"])
@pytest.mark.parametrize("keep", [0, 0.5])
def test_a_store_that_was_cut_short_is_refused(folder, name, keep):
    store, _ = store_of(folder)
    place = Path(store.folder, name)
    place.write_bytes(place.read_bytes()[: round(keep * place.stat().st_size)])
    with pytest.raises(UserError, match=r"damaged|cannot be read"):
        main([f"--show={store.folder}", "--document=5"])


def test_in_memory_split_equals_the_store(folder):
    store, _ = store_of(folder)
    split = store.split("train")
    texts = [
        store.vocabulary.decode(split.tokens[a:b]).encode()
        for a, b in zip(split.offsets, split.offsets[1:], strict=False)
    ]
    again = split_in_memory(texts, store.vocabulary)
    for name in ("tokens", "offsets", "bytes", "words"):
        np.testing.assert_array_equal(getattr(again, name)[:], getattr(split, name)[:])


def test_python_stdlib_is_one_document_per_top_level_name(tmp_path):
    source = sources.PythonStdlib()
    texts = {document.name: document.text for unit in source.units() for document in source.read(unit, Dropped())}
    assert texts["json"].startswith(Path(json.__file__).read_bytes())
    assert b"class JSONDecoder" in texts["json"] and {"asyncio", "abc"} <= set(texts)


def test_words_counted_from_the_training_text(tmp_path, capsys):
    """A small corpus in the Penn Treebank's form: its counts differ from the published ones, and that is told."""
    for split, text in {"train": " a b a \n c <unk> \n", "valid": " a c \n", "test": " d b \n"}.items():
        (tmp_path / f"ptb.{split}.txt").write_text(text)
    main(["--task=ptb_words", f"--input={tmp_path}", f"--output={tmp_path}/store", "--workers=1"])
    told = " ".join(capsys.readouterr().out.split())
    assert "not as published: train has 7 tokens, published are 929,589" in told
    assert "the vocabulary has 5 entries, published are 10,000" in told
    store = open_store(tmp_path / "store")
    assert store.vocabulary.words == [b"<eos>", b"a", b"<unk>", b"b", b"c"]
    assert store.manifest["contiguous"] and store.split("train").contiguous
    assert list(documents_in(store)) == ["a b a\nc <unk>\n", "a c\n", "<unk> b\n"]
    assert store.split("test").bytes.tolist() == [len(" b\n")], "all but the first word, though it is unknown"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "say what to do"),
        (["--task=pg19_byte"], "no task 'pg19_byte' (did you mean pg19_bytes?)"),
        (["--task=pg19_bytes"], "--task=pg19_bytes needs --input: PG19's folder"),
        (["--task=pg19_tokens", "--input=x"], "needs --vocabulary=PATH"),
        (["--task=pg19_bytes", "--input=x", "--vocabulary={list}"], "is made of bytes: --vocabulary="),
        (["--task=python_stdlib", "--input=x"], "--input does not go with --task=python_stdlib"),
        (["--task=arxiv_math_bytes", "--input=x"], "needs --metadata"),
        (["--task=text_files", "--input=x", "--workers=0"], "--workers: '0' is not a whole number"),
        (["--task=text_files", "--input=x", "--beam.project=p"], "goes with --runner"),
        (["--show=nowhere"], "no prepared data in nowhere"),
        (["--mixture=data/x", "--output=y"], "give STORE=RATE"),
        (["--train_vocabulary=x.model"], "needs --task"),
        (["--train_vocabulary=x.txt", "--task=python_stdlib"], "ends in .model"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("<eos>\na\n")
    with pytest.raises(SystemExit) as code:
        run_command(main, [argument.format(list=tmp_path / "words.txt") for argument in arguments])
    error = capsys.readouterr().err
    assert code.value.code == MISTAKE
    assert told in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_takes_no_more_is_told_in_one_line(number, folder, monkeypatch, capsys):
    def write(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "write_bytes", write)
    with pytest.raises(SystemExit) as code:
        run_command(main, ["--task=text_files", f"--input={folder}", f"--output={folder.parent}/store", "--workers=1"])
    error = capsys.readouterr().err
    assert code.value.code == MISTAKE and "give the same command again" in error and error.count("\n") == 1


def test_the_list_names_every_task_with_what_it_needs(capsys):
    main(["--list"])
    told = capsys.readouterr().out
    assert (
        all(name in told for name in TASKS) and "arXiv_src_YYMM_NNN.tar" in told and "gs://deepmind-gutenberg" in told
    )


def test_the_number_of_cores_is_found_on_macos_too(capsys, monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    main(["--list"])
    assert "pg19_bytes" in capsys.readouterr().out


def test_a_document_is_shown_with_its_segments_and_blocks(tmp_path, capsys):
    (tmp_path / "texts" / "train").mkdir(parents=True)
    for i in range(6):
        (tmp_path / "texts" / "train" / f"{i}.txt").write_text(f"the letters of {i}: " + "abcdefgh" * 3)
    store, _ = store_of(tmp_path / "texts")
    main(["--show", store.folder, "--document", "3", "--segment=32", "--block=16", "--blocks=0"])
    assert [line.rstrip("=- ") for line in capsys.readouterr().out.splitlines()] == [
        "document 3 of train: train/3.txt",
        "42 tokens: 2 segments of 32, 3 blocks of 16",
        "== segment 0",
        "-- block 0: tokens 0 to 15",
        "the letters of 3",
        "-- block 1: tokens 16 to 31",
        ": abcdefghabcdef",
        "== segment 1",
        "-- block 2: tokens 32 to 41, then 6 of padding",
        "ghabcdefgh",
    ]
    main(["--show", store.folder, "--document", "3", "--segment=32", "--block=16", "--blocks=1"])
    assert "... 2 more blocks: --blocks=0 prints all" in capsys.readouterr().out
    with pytest.raises(UserError, match="has documents 0 to 5: there is no 9"):
        main(["--show", store.folder, "--document", "9"])
    with pytest.raises(UserError, match="is not a multiple of"):
        main(["--show", store.folder, "--segment=30", "--block=16"])


def test_a_vocabulary_is_trained_from_a_corpus_and_used(folder, tmp_path, capsys):
    texts = "".join(f"line {i}:\tnaïve façade and more words\n\n" for i in range(400))
    (folder / "long.txt").write_text(texts)
    model = tmp_path / "mine.model"
    main([f"--train_vocabulary={model}", "--size=330", "--task=text_files", f"--input={folder}"])
    assert "use it with --vocabulary=" in capsys.readouterr().out
    store, _ = store_of(folder, vocabulary=str(model))
    assert store.manifest["vocabulary"] == {"kind": "sentencepiece", "size": 330, "sha256": vocabulary(model).identity}
    assert texts in set(documents_in(store)), "newlines and tabs survive"
    with pytest.raises(UserError, match="exists already"):
        main([f"--train_vocabulary={model}", "--size=330", "--task=text_files", f"--input={folder}"])
