"""Where a task's store is: made by one function, and of the standard library one for each version of Python."""

import json
import platform
import sys

import pytest
from etils import epath

from block_recurrent import compare
from block_recurrent.data.store import open_store
from block_recurrent.errors import UserError
from block_recurrent.inference.run import RUN
from block_recurrent.prepare import main, prepare
from block_recurrent.training.loop import store_of_run


@pytest.fixture(autouse=True)
def python(tmp_path, monkeypatch):
    """Another version of Python, with another library, in the same clone."""
    monkeypatch.chdir(tmp_path)

    def become(version, *modules):
        monkeypatch.setattr(platform, "python_version", lambda: version)
        monkeypatch.setattr(sys, "stdlib_module_names", frozenset(modules))

    return become


def test_each_version_of_python_has_its_own_store(python, capsys):
    with pytest.raises(UserError, match=r"prepare --task=python_stdlib$"):
        open_store("data/python_stdlib")
    for version, modules in (("3.98.1", ["abc", "this"]), ("3.99.0", ["abc", "bisect"]), ("3.98.1", ["abc", "this"])):
        python(version, *modules)
        main(["--task=python_stdlib", "--workers=1"])
        store = open_store("data/python_stdlib")
        assert store.folder == f"data/python_stdlib-{version}"
        assert sum(store.manifest["splits"][split]["documents"] for split in store.manifest["splits"]) == len(modules)
    capsys.readouterr()
    main(["--list"])
    assert "in data/python_stdlib-3.98.1" in capsys.readouterr().out
    main(["--show=python_stdlib"])
    assert "of train: " in capsys.readouterr().out


def test_a_store_of_an_earlier_version_is_opened_where_there_is_no_other(python):
    old = write_store("data/python_stdlib")
    python("3.98.1", "this")
    assert open_store("data/python_stdlib").folder == old.folder
    options = compare.parse(["x.gin", "--task=python_stdlib", "--output=y"])[0]
    assert compare.prepared_store(options, {}).folder == old.folder
    new = write_store("data/python_stdlib-3.98.1")
    assert open_store("./data/python_stdlib/").folder == new.folder
    assert open_store(epath.Path(old.folder).absolute()).folder.endswith("data/python_stdlib"), "by its whole path"


def test_a_run_goes_on_with_the_store_that_it_began_with(python, tmp_path):
    """After a change of Python, the run of `make quickstart` that is there is one of the old store."""
    old, new = write_store("data/python_stdlib-3.98.1"), write_store("data/python_stdlib-3.99.0")
    python("3.99.0")
    run = epath.Path(tmp_path / "run")
    assert open_store(store_of_run(run, "data/python_stdlib")).folder == new.folder
    run.mkdir()
    place = str(tmp_path / old.folder)
    (run / RUN).write_text(json.dumps({"command": "", "store": place, "splits": {}, "vocabulary": {}}))
    assert store_of_run(run, "data/python_stdlib") == place
    assert store_of_run(run, new.folder) == new.folder, "asked for by its own name"
    for given in ("--task=python_stdlib", "--store=data/python_stdlib"):
        options = compare.parse(["x.gin", given, f"--output={tmp_path}"])[0]
        assert compare.prepared_store(options, {}).folder == place


def test_a_store_is_made_where_the_output_says(python):
    """Though `data/python_stdlib` is opened as another."""
    python("3.98.1")
    write_store("data/python_stdlib-3.98.1")
    old = write_store("data/python_stdlib")
    assert old.folder == "data/python_stdlib"
    assert prepare("text_files", old.folder, input="texts")[0].folder == old.folder


def write_store(folder):
    epath.Path("texts").mkdir(exist_ok=True)
    for i in range(3):
        epath.Path(f"texts/{i}").write_text(f"text {i} of {folder}")
    return prepare("text_files", folder, input="texts")[0]
