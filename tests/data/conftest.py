"""A few small texts, and a SentencePiece model trained on them."""

import pytest
import sentencepiece

TEXTS = {f"{i}.txt": f"Document {i}: naïve façade\n\tand more {'words ' * i}" for i in range(8)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "texts" / name).write_text(text)
    return tmp_path / "texts"


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory):
    """A small model trained on the spot, with the ids that seqio expects and bytes for what it does not know."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "corpus.txt").write_text("\n".join(TEXTS.values()) + "\nThe quick brown fox jumps over the lazy dog.\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tiny"),
        vocab_size=310,
        hard_vocab_limit=False,
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return folder / "tiny.model"
