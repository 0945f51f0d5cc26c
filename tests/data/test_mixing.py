"""Mixtures of stores, and what seqio sees of stores and corpora."""

import shutil

import numpy as np
import pytest

from block_recurrent.data.documents import SPLITS
from block_recurrent.data.github import GitHubParquet
from block_recurrent.data.rows import RowStream
from block_recurrent.data.store import contents, open_store
from block_recurrent.data.text_files import TextFiles
from block_recurrent.data.vocabulary import ByteVocabulary, vocabulary
from block_recurrent.errors import UserError
from block_recurrent.prepare import main, prepare


@pytest.fixture(scope="module")
def two_stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for name, letter in (("first", "a"), ("second", "b")):
        (folder / "texts" / name).mkdir(parents=True)
        for i in range(8):
            (folder / "texts" / name / f"{i}.txt").write_text(letter * (20 + i))
        prepare("text_files", folder / name, input=str(folder / "texts" / name))
    return folder


def test_a_mixture_of_stores_is_a_store(two_stores, tmp_path):
    main([f"--mixture={two_stores}/first=3,{two_stores}/second=1", f"--output={tmp_path}/both"])
    store = open_store(tmp_path / "both")
    stream = RowStream(store.split("train"), rows=2, segment=16, block=1)
    cursor, counts = stream.begin(), {"a": 0, "b": 0}
    for _ in range(100):
        batch, cursor = stream.read(cursor)
        for letter in counts:
            counts[letter] += int(np.sum(batch["targets"][batch["weights"] > 0] == ord(letter) + 3))
    assert abs(counts["a"] / sum(counts.values()) - 0.75) < 0.03
    held_out = store.split("validation")
    seen = [batch["weights"].sum() for batch in RowStream(held_out, 2, 16, 1, shuffle=False, epochs=1)]
    assert sum(seen) == store.manifest["splits"]["validation"]["predictions"]


def test_a_store_is_in_a_mixture_once(two_stores, tmp_path):
    with pytest.raises(UserError, match="there twice"):
        main([f"--mixture={two_stores}/first=1,{two_stores}/first/=2", f"--output={tmp_path}/both"])


def test_stores_of_any_name_mix(two_stores, tmp_path):
    shutil.copytree(two_stores / "first", tmp_path / "my 'first' [é]")
    main([f"--mixture={tmp_path}/my 'first' [é]=1,{two_stores}/second=1", f"--output={tmp_path}/both"])
    assert open_store(tmp_path / "both").split("train")


def test_a_mixture_notices_that_a_part_has_changed(two_stores, tmp_path):
    shutil.copytree(two_stores / "first", tmp_path / "first")
    main([f"--mixture={tmp_path}/first=1,{two_stores}/second=1", f"--output={tmp_path}/both"])
    prepare("text_files", tmp_path / "first", input=str(two_stores / "texts" / "second"), overwrite=True)
    with pytest.raises(UserError, match=r"first has changed since .*both was made of it"):
        open_store(tmp_path / "both").split("train")


def test_a_mixture_at_other_rates_is_other_data(two_stores, tmp_path):
    """So that a run that was trained on the one does not go on with the other."""
    for rate in (1, 2):
        main([f"--mixture={two_stores}/first={rate},{two_stores}/second=1", f"--output={tmp_path}/{rate}"])
    assert contents(open_store(tmp_path / "1")) != contents(open_store(tmp_path / "2"))


def test_a_mixture_made_again_has_its_own_picture(two_stores, tmp_path):
    picture = tmp_path / "both" / "lengths.png"
    for parts in (f"{two_stores}/first=1", f"{two_stores}/first=1,{two_stores}/second=1"):
        before = picture.read_bytes() if picture.exists() else b""
        main([f"--mixture={parts}", f"--output={tmp_path}/both", "--overwrite"])
        assert picture.read_bytes() != before


def test_only_a_mixture_is_overwritten_by_a_mixture(two_stores, tmp_path):
    shutil.copytree(two_stores / "first", tmp_path / "first")
    parts = f"--mixture={tmp_path}/first=1,{two_stores}/second=1"
    with pytest.raises(UserError, match="is a store of its own"):
        main([parts, f"--output={tmp_path}/first", "--overwrite"])
    assert open_store(tmp_path / "first").split("train").tokens[:1].size
    for _ in range(2):
        main([parts, f"--output={tmp_path}/both", "--overwrite"])


def test_stores_of_different_vocabularies_do_not_mix(two_stores, tmp_path, sentencepiece_model):
    prepare(
        "text_files",
        tmp_path / "pieces",
        input=str(two_stores / "texts" / "first"),
        vocabulary=str(sentencepiece_model),
    )
    with pytest.raises(UserError, match="have different vocabularies"):
        main([f"--mixture={two_stores}/first=1,{tmp_path}/pieces=1", f"--output={tmp_path}/both"])
    assert not (tmp_path / "both").exists()


def test_seqio_sees_the_same_documents_and_tokens(folder, two_stores, sentencepiece_model):
    """A Task over the raw corpus, one over its store, and a Mixture of stores, by seqio's own registries."""
    from block_recurrent.data import tasks

    ours = vocabulary(str(sentencepiece_model))
    store, _ = prepare("text_files", folder.parent / "store", input=str(folder), vocabulary=str(sentencepiece_model))
    raw = tasks.register("raw_files", TextFiles(str(folder)), ours)
    tasks.register_store("prepared_files", store)
    get = tasks.seqio.get_mixture_or_task

    def tokens(name, splits):
        return {
            example["name"].decode(): example["targets"].tolist()
            for split in splits
            for example in get(name).get_dataset(None, split, shuffle=False).as_numpy_iterator()
        }

    assert raw.splits == ("train",)
    assert tokens("raw_files", ["train"]) == tokens("prepared_files", SPLITS)
    stores = {name: (open_store(two_stores / name), rate) for name, rate in (("first", 3.0), ("second", 1.0))}
    mixture = tasks.register_mixture("both", stores)
    assert mixture.get_rate(get("first")) == 3.0
    examples = mixture.get_dataset(None, "train", shuffle=False, num_epochs=None).take(400).as_numpy_iterator()
    share = np.mean([example["targets"][0] == ord("a") + 3 for example in examples])
    assert abs(share - 0.75) < 0.08


def test_seqio_reads_scattered_documents_from_a_store_only(tmp_path):
    from block_recurrent.data import tasks

    with pytest.raises(UserError, match="prepare a store, and register that"):
        tasks.register("tables", GitHubParquet(str(tmp_path)), ByteVocabulary())


def test_prepared_tasks_are_registered_under_their_names(two_stores, tmp_path):
    from block_recurrent.data import tasks

    shutil.copytree(two_stores / "first", tmp_path / "text_files")
    assert tasks.register_prepared(str(tmp_path)) == ["text_files"]
    assert "text_files" in tasks.seqio.TaskRegistry.names()
