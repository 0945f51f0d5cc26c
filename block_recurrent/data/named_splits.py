"""Which split a file is for, where its own name or its top folder's says so, and which files are no texts at all."""

import re
from collections.abc import Iterable, Sequence

from block_recurrent.data.source_files import language_of

SPLIT_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    "test": "test",
}
WORD = re.compile(r"[^._-]+")
SHARD = re.compile(rf"({'|'.join(SPLIT_OF)})(?:[_-]?v?\d[\w-]*)?")  # test, test-00001-of-00005, train-v1, test_2016_en
CHECKSUMS = re.compile(r"(?:(?:sha\d*|md5|b2|check)sums?(?:[._-].*)?|.*\.(?:sha\d+|md5)(?:sums?)?)", re.IGNORECASE)
ABOUT = re.compile(r"(?:readme|licen[cs]e|copying|notice|citation)(?:[._-].*)?", re.IGNORECASE)

UNNAMED = "not named as a split, as others are"


def splits_by_name(names: Sequence[str]) -> dict[str, str]:
    """The splits of those files, given by their paths, whose names say them.

    A folder says it at the top (`train/a.txt`), or below if one says it for every file (`en/train/a.txt`); at the top
    also by a part of its name, where another is called the same but for that (`test_data` and `train_data`). A file
    says it anywhere: by its whole name (`test.txt`), by a part between dots or before a number (`ptb.valid.txt`,
    `test-00001.txt`), and by any other part, or with the extension of a program, if another file is called the same but
    for that (`corpus_dev.txt` and `corpus_train.txt`).
    """
    found, forms = splits_by_folder(names), {}
    if found:
        return found
    paths = without_common_folder(names)
    tops = splits_of_alike(path.partition("/")[0] for path in paths if "/" in path)
    for name, path in zip(names, paths, strict=True):
        top, _, below = path.partition("/")
        base = path.rpartition("/")[2].lower().removesuffix(".gz")
        parts = [] if language_of(base) else [match[1] for part in base.split(".") if (match := SHARD.fullmatch(part))]
        if below and top.lower() in SPLIT_OF:
            found[name] = SPLIT_OF[top.lower()]
        elif below and top in tops:
            found[name] = tops[top]
        elif split := the_one(parts):
            found[name] = split
        else:
            forms[name] = base
    alike = splits_of_alike(forms.values())
    return found | {name: alike[base] for name, base in forms.items() if base in alike}


def splits_of_alike(names: Iterable[str]) -> dict[str, str]:
    """The splits that words in names mean, of names that are alike but for those words and for numbers."""
    forms: dict[str, dict[str, str]] = {}
    for name in names:
        if split := split_of_words(name):
            form = WORD.sub(lambda word: "*" if word[0] in SPLIT_OF else word[0], name.lower())
            form = re.sub(r"\d+", "0", form).replace("-", "_").removesuffix("_0")
            forms.setdefault(form, {})[name] = split
    found: dict[str, str] = {}
    for alike in forms.values():
        if len(set(alike.values())) > 1:
            found |= alike
    return found


def split_of_words(name: str) -> str | None:
    """The split that the words in a name mean."""
    return the_one([word for word in WORD.findall(name.lower()) if word in SPLIT_OF])


def splits_by_folder(names: Sequence[str]) -> dict[str, str]:
    """The splits of files that are all in a folder that says one, however deep, but for what tells about them."""
    found = {name: split_of_folders(name) for name in names if not ABOUT.fullmatch(name.rpartition("/")[2])}
    return found if all(found.values()) else {}


def split_of_folders(name: str) -> str | None:
    """The split that the folders of a file's path mean by their whole names."""
    return the_one([folder for folder in name.lower().split("/")[:-1] if folder in SPLIT_OF])


def the_one(words: Sequence[str]) -> str | None:
    """The split that all the words mean."""
    splits = {SPLIT_OF[word] for word in words}
    return splits.pop() if len(splits) == 1 else None


def without_common_folder(names: Sequence[str]) -> list[str]:
    """Paths without the folders that all of them are in, such as the one that an archive unpacked to."""
    folders = [name.split("/")[:-1] for name in names]
    common = 0
    while folders and all(
        len(parts) > common and parts[common] == folders[0][common] and parts[common].lower() not in SPLIT_OF
        for parts in folders
    ):
        common += 1
    return [name.split("/", common)[-1] for name in names]


def no_text(names: Sequence[str]) -> dict[str, str]:
    """Why some files are left out: lists of checksums, and at the top what tells about the others."""
    found = {}
    for name, path in zip(names, without_common_folder(names), strict=True):
        if CHECKSUMS.fullmatch(path.rpartition("/")[2]):
            found[name] = "checksums"
        elif ABOUT.fullmatch(path):
            found[name] = "about the texts"
    return found
