"""A person's own texts: splits by their names, a text once, and the forms that files come in."""

import gzip
import itertools
import json

import pytest

from block_recurrent.data import files
from block_recurrent.data.looking import arranged, warnings
from block_recurrent.data.named_splits import splits_by_name
from block_recurrent.data.sources import texts_in
from block_recurrent.data.store import open_store
from block_recurrent.errors import MISTAKE, UserError, run_command
from block_recurrent.prepare import main, prepare

AS_DOWNLOADED = {
    "train.txt": "to learn from, and a good deal of it",
    "valid.txt": "to choose by",
    "test.txt": "to be judged by",
    "README.md": "what this is",
    "SHA256SUMS": "0123abcd  train.txt",
    "extra.txt": "what nobody asked for",
}


def written(folder, texts):
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def documents_of(store) -> dict[str, dict[str, str]]:
    """The documents of a store by split and name."""
    found = {}
    for split in store.manifest["splits"]:
        tokens, offsets = (store.split(split).tokens, store.split(split).offsets) if store.has(split) else (None, [])
        texts = [store.vocabulary.decode(tokens[a:b]) for a, b in itertools.pairwise(offsets)]
        found[split] = dict(zip(store.names(split), texts, strict=True))
    return found


def prepared(tmp_path, texts, **options):
    place = written(tmp_path / "texts", texts)
    return prepare("text_files", tmp_path / "store", input=place, **options)[0]


def dropped(store) -> dict[str, list[str]]:
    return {reason: entry["examples"] for reason, entry in store.manifest["dropped"].items()}


def test_a_folder_as_it_is_downloaded_goes_into_the_splits_of_its_names(tmp_path, capsys):
    place = [f"--input={written(tmp_path / 'texts', AS_DOWNLOADED)}", f"--output={tmp_path}/store", "--workers=1"]
    main(["--task=text_files", *place])
    store = open_store(tmp_path / "store")
    assert {split: list(texts) for split, texts in documents_of(store).items()} == {
        "train": ["train.txt"],
        "validation": ["valid.txt"],
        "test": ["test.txt"],
    }
    told = capsys.readouterr().out
    for line in (
        "train by its name: train.txt",
        "test by its name: test.txt",
        "not named as a split, as others are (extra.txt)",
        "checksums (SHA256SUMS)",
        "about the texts (README.md)",
        "warning: test has 15 tokens, less than a segment of 4,096",
    ):
        assert line in told


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("train/a Dev/b test/c/d", "train validation test"),
        ("corpus/Train/a corpus/VALID/b", "train validation"),
        ("en/train/a en/test/b de/dev/c/d en/README.md", "train test validation -"),
        ("en/train/a en/test/b notes.txt", "- - -"),
        ("train/dev/a test/train/b", "train test"),
        ("x/train_data/a x/valid_data/b x/test_data/c", "train validation test"),
        ("train-clean-100/a dev-clean/b test-clean/c other/d", "train validation test -"),
        ("test-driven/a dev-tools/b training/c", "- - train"),
        ("ptb.train.txt ptb.char.test.txt wiki.valid.tokens.gz", "train test validation"),
        ("train-v1.1.json test-00001-of-00005.txt dev_2.txt", "train test validation"),
        ("train.de-en.de test_2016_flickr.en", "train test"),
        ("corpus_train.txt corpus-dev.txt", "train validation"),
        ("the-driving-test.txt a-test-of-time.txt test_plan.md my.txt", "- - - -"),
        ("test.py train_model.py", "- -"),
        ("train_and_test.txt latest.txt", "- -"),
        ("news.txt TEST.TXT", "- test"),
    ],
)
def test_what_a_name_says(names, splits):
    found = splits_by_name(names.split())
    assert [found.get(name, "-") for name in names.split()] == splits.split()


def test_where_no_name_says_what_to_train_on_the_other_files_are_split(tmp_path):
    store = prepared(tmp_path, {f"{i}.txt": f"text {i}" for i in range(5)} | {"test.txt": "judge"})
    found = documents_of(store)
    assert list(found["test"]) == ["test.txt"] and len(found["validation"]) == 1 and len(found["train"]) == 4
    told = list(arranged(store))
    assert told[1:] == [
        "the other documents: into splits by a hash of their names",
        f"validation: {next(iter(found['validation']))}",
    ]
    with pytest.raises(UserError, match=r"no training texts in .*: call a file train.txt"):
        prepared(tmp_path / "other", {"test.txt": "judge", "valid.txt": "choose"})


def test_folders_of_splits_that_are_not_followed_are_named(tmp_path):
    texts = {f"{name}.txt": f"text of {name}" for name in ("en/test_2/a", "en/train/b", "c", "d", "e")}
    told = list(warnings(prepared(tmp_path, texts)))
    assert any("here they do not: en/test_2/a.txt, en/train/b.txt" in line for line in told)


ORIGINALS = [f"The text of {i}:\n  so it is." for i in range(10)]
CHANGES = (  # of white space, in the copies that are planted
    lambda text: text,
    lambda text: text.replace(" ", "\r\n "),
    lambda text: f"\n\n{text}\t ",
    lambda text: text.replace(" ", "\u00a0\u3000"),
    lambda text: f"\ufeff{' '.join(text.split())}",
)
LEAKS = [change(text) for text, change in zip(ORIGINALS, itertools.cycle(CHANGES), strict=False)]
OTHERS = [f"another text, of {i}" for i in range(10)]


def each_a_file(name: str, texts: list[str]) -> dict[str, str]:
    return {name.format(i): text for i, text in enumerate(texts)}


def lines_of_json(texts: list[str]) -> str:
    return "".join(json.dumps({"body": text}) + "\n" for text in texts)


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        (each_a_file("{}.txt", ORIGINALS + OTHERS) | each_a_file("z/{}.txt", LEAKS), {}),
        (each_a_file("test/{}.txt", ORIGINALS) | each_a_file("{}.txt", LEAKS + OTHERS), {}),
        ({"all.txt": "<end>".join(ORIGINALS + OTHERS + LEAKS)}, {"split_on": "<end>"}),
        ({"test.txt": "<end>".join(ORIGINALS), "all.txt": "<end>".join(LEAKS + OTHERS)}, {"split_on": "<end>"}),
        ({"all.jsonl": lines_of_json(LEAKS + OTHERS + ORIGINALS)}, {"text": "body"}),
        ({"dev.jsonl": lines_of_json(ORIGINALS), "all.jsonl": lines_of_json(LEAKS + OTHERS)}, {"text": "body"}),
    ],
    ids=["files", "test-files", "one-file", "test-file", "json", "dev-json"],
)
def test_ten_planted_leaks_are_left_out_where_the_splits_are_ours(tmp_path, texts, options):
    """Copies of ten documents, wherever these have gone: each text is kept once, and the others are named."""
    store = prepared(tmp_path, texts, **options)
    kept = [" ".join(text.split()) for each in documents_of(store).values() for text in each.values()]
    assert len(kept) == len(set(kept)) == 20 and not store.manifest["identical"]
    duplicates = store.manifest["dropped"]["duplicate"]
    assert duplicates["count"] == len(duplicates["examples"]) == 10
    if any(name.startswith(("test", "dev")) for name in texts):
        held_out = [split for split, each in documents_of(store).items() if ORIGINALS[0] in each.values()]
        assert held_out in (["test"], ["validation"]), "the copy that is kept is the one held out"


BOOKS = {
    f"{split}/{i}{j}.txt": text
    for i, (split, texts) in enumerate(
        {"train": LEAKS + OTHERS, "test": ORIGINALS, "validation": ["to choose by"]}.items()
    )
    for j, text in enumerate(texts)
}


@pytest.mark.parametrize(
    ("task", "texts", "options"),
    [
        ("text_files", each_a_file("test/{}.txt", ORIGINALS) | each_a_file("train/{}.txt", LEAKS + OTHERS), {}),
        (
            "text_files",
            {"test.txt": "<end>".join(ORIGINALS), "train.txt": "<end>".join(LEAKS + OTHERS)},
            {"split_on": "<end>"},
        ),
        (
            "text_files",
            {"test.jsonl": lines_of_json(ORIGINALS), "train.jsonl": lines_of_json(LEAKS + OTHERS)},
            {"text": "body"},
        ),
        ("pg19_bytes", BOOKS, {}),
    ],
    ids=["folders", "files", "json", "published"],
)
def test_leaks_between_splits_that_are_not_ours_are_counted_and_named(tmp_path, task, texts, options):
    store, _ = prepare(task, tmp_path / "store", input=written(tmp_path / "texts", texts), **options)
    sizes = {split: len(each) for split, each in documents_of(store).items()}
    assert (sizes["train"], sizes["test"]) == (20, 10) and not store.manifest["dropped"], "nothing is changed"
    assert list(store.manifest["identical"]) == ["test in train"]
    found = store.manifest["identical"]["test in train"]
    assert found["count"] == len(set(found["examples"])) == 10
    assert any(line.startswith("identical: 10 of test are also in train (") for line in arranged(store))


def test_identical_texts_and_missing_splits_are_told_of_folders_by_name(tmp_path):
    texts = {"test/a.txt": "The text of a.", "train/b.txt": "The text\n of a. ", "train/own.txt": "another text"}
    store = prepared(tmp_path, texts)
    (*_, told) = arranged(store)
    assert told == "identical: 1 of test is also in train (test/a.txt = train/b.txt)"
    assert next(warnings(store)) == "there is no validation text, so that nothing can be measured on it"


def test_a_held_out_split_that_is_larger_than_training_or_small_gets_a_warning(tmp_path):
    store = prepared(tmp_path, {"train.txt": "a" * 4999, "valid.txt": "b" * 5000, "test.txt": "c" * 4095})
    assert list(warnings(store)) == [
        "validation is larger than train: 5,000 tokens to 4,999",
        "test has 4,095 tokens, less than a segment of 4,096: its figures say little",
    ]
    del store.manifest["arranged"], store.manifest["identical"]
    (told,) = warnings(store)
    assert told.startswith("an earlier version made this, which did not look for the same text in two splits")


@pytest.mark.parametrize("text", ["line {}\n", "naïve façade {} "])
def test_the_end_of_one_file_is_cut_where_a_line_or_a_character_begins(tmp_path, text):
    whole = "".join(text.format(i) for i in range(200))
    store = prepared(tmp_path, {"book.txt": whole, "SHA256SUMS": "..."})
    parts = {split: "".join(texts.values()) for split, texts in documents_of(store).items()}
    assert "".join(parts.values()) == whole
    assert all(0.045 < len(parts[split]) / len(whole) < 0.075 for split in ("validation", "test"))
    assert all(part.endswith("\n") == text.endswith("\n") for part in parts.values())
    assert prepare("text_files", tmp_path / "store", input=f"{tmp_path}/texts/book.txt")[1] is False
    assert list(arranged(store)) == ["one text: its last tenth is held out, 5 % as validation and 5 % as test"]


def test_links_to_files_are_read_and_links_to_folders_are_named(tmp_path):
    (tmp_path / "texts").mkdir()
    written(tmp_path / "elsewhere", {"a": "another text"})
    (tmp_path / "texts" / "link.txt").symlink_to(tmp_path / "elsewhere" / "a")
    (tmp_path / "texts" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "texts" / "nowhere").symlink_to("nothing")
    store = prepared(tmp_path, {"b.txt": "a text"})
    assert sorted(name for each in documents_of(store).values() for name in each) == ["b.txt", "link.txt"]
    assert dropped(store) == {"symbolic link": ["folder", "nowhere"]}


def test_compressed_files_are_read_and_bombs_and_damaged_ones_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SMALL", 1 << 20)
    whole = gzip.compress(b"a text " * 100)
    store = prepared(
        tmp_path,
        {
            "a.txt.gz": whole,
            "bomb.gz": gzip.compress(b"a" * (4 << 20)),
            "b.gz": whole[:-9],
            "c.gz": b"text",
            "d": "text",
        },
    )
    assert sorted(name for each in documents_of(store).values() for name in each) == ["a.txt.gz", "d"]
    assert dropped(store) == {"damaged gzip": ["b.gz", "c.gz"], "expands without end": ["bomb.gz"]}
    assert texts_in(f"{tmp_path}/texts/a*") == {f"{tmp_path}/texts/a.txt.gz": b"a text " * 100}
    with pytest.raises(UserError, match=r"b.gz cannot be read \(damaged gzip\)"):
        texts_in(f"{tmp_path}/texts/b.gz")


RECORDS = [{"id": i, "body": f"text {i}"} for i in range(8)]
BROKEN = ["", "no JSON", "[1]", json.dumps({"id": 9}), json.dumps({"body": "half \ud800"}), json.dumps({"body": "\0"})]


def test_json_lines_are_documents_and_what_is_none_is_named(tmp_path):
    lines = "\n".join([*map(json.dumps, RECORDS), *BROKEN])
    store = prepared(tmp_path, {"a.jsonl.gz": gzip.compress(lines.encode()), "notes.csv": "1,2"}, text="body")
    found = documents_of(store)
    assert {split: len(texts) for split, texts in found.items()} == {"train": 6, "validation": 1, "test": 1}
    assert {name: text for texts in found.values() for name, text in texts.items()} == {
        f"a.jsonl.gz:{i + 1}": record["body"] for i, record in enumerate(RECORDS)
    }
    assert dropped(store) == {
        "NUL bytes": ["a.jsonl.gz:14"],
        "no JSON object": ["a.jsonl.gz:10", "a.jsonl.gz:11"],
        "no text in the field 'body'": ["a.jsonl.gz:12"],
        "not UTF-8": ["a.jsonl.gz:13"],
        "not called .jsonl, .ndjson or .json": ["notes.csv"],
    }


@pytest.mark.parametrize(("mark", "typed"), [("<|end|>", "<|end|>"), ("\n\n", r"\n\n")])
def test_one_file_of_several_documents(tmp_path, mark, typed, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 3)
    texts = [f"text\n{i}" for i in range(8)]
    store = prepared(tmp_path, {"all.txt": f"\n{mark}".join(texts) + mark}, split_on=typed)
    found = documents_of(store)
    assert {split: len(each) for split, each in found.items()} == {"train": 6, "validation": 1, "test": 1}
    assert {name: text for each in found.values() for name, text in each.items()} == {
        f"all.txt:{i + 1}": text for i, text in enumerate(texts)
    }


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--text=txt"], "train.jsonl, line 1, has no field 'txt': it has id, body"),
        (["--text="], "--text and --split_on want a value"),
        (["--text=body", "--split_on=x"], "--split_on does not go with --text"),
        (["--split_on=<end>"], "holds no two documents with '<end>' between them"),
        (["--task=enwik8_bytes", "--text=body"], "--text does not go with --task=enwik8_bytes, which takes --input"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, options, told, capsys):
    written(tmp_path, {"train.jsonl": json.dumps(RECORDS[0])})
    place = [f"--input={tmp_path}/train.jsonl", f"--output={tmp_path}/store", "--workers=1"]
    with pytest.raises(SystemExit) as code:
        run_command(main, ["--task=text_files", *place, *options])
    error = capsys.readouterr().err
    assert code.value.code == MISTAKE and told in error and error.count("\n") == 1
