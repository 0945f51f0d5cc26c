"""A training run opened from its workdir alone: its config, vocabulary, data and parameters."""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import linen as nn

from block_recurrent.checkpoints import Checkpoints
from block_recurrent.config import CONFIG, bindings_of, edited, has_checkpoint, load_config
from block_recurrent.data import files
from block_recurrent.data.store import Mixture, Split, Store, contents, is_store, open_store, place_of, split_in_memory
from block_recurrent.data.vocabulary import (
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
    WordVocabulary,
    saved_vocabulary,
)
from block_recurrent.device_memory import require_room
from block_recurrent.errors import UserError
from block_recurrent.inference.beams import BeamSearch
from block_recurrent.inference.dynamic import DynamicEvaluator, Learning
from block_recurrent.inference.evaluation import Evaluator
from block_recurrent.inference.folders import what_it_is
from block_recurrent.inference.generation import Generator, Sampling
from block_recurrent.inference.history import HistoryCurve, history_curve
from block_recurrent.inference.inspection import inside
from block_recurrent.inference.labels import MeasuredLabels, measure_labels
from block_recurrent.inference.measuring import Measured, measure
from block_recurrent.inference.stop_strings import ends_in_stop, texts_of
from block_recurrent.inference.streaming import Scorer, Scores, Stream
from block_recurrent.writing import write_text

METRICS = "metrics.jsonl"
RUN = "run.json"
STOPPED = "stopped.json"  # of a run that its held-out losses ended before its steps: at which step, and why
TRAIN = "block_recurrent.training.loop.train"  # what the config is of


def run_folder(place: str | Path) -> epath.Path:
    """The path of a run, here or in gs://, the only buckets in which Orbax saves arrays."""
    if files.is_remote(place):
        if not str(place).startswith("gs://"):
            raise UserError(f"{place}: a run is in a local folder or in gs://..., where Orbax can save checkpoints")
        # What one process of a run renames, the others see at once.
        fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
        system, path = files.file_system(str(place))
        try:
            system.info(path.partition("/")[0])
        except Exception as error:  # clients of buckets have errors of their own
            raise UserError(f"{place}: the bucket cannot be reached ({type(error).__name__}: {error})") from error
    return epath.Path(place)


def save_run(workdir: epath.Path, store: Store, command: str, source: dict[str, Any] | None = None) -> None:
    """Notes how a run was started, on which data, with which vocabulary; refuses other data than it began with.

    `source` tells whose parameters a new run begins with.
    """
    about = {
        "command": command,
        "store": files.absolute(store.folder),
        "splits": contents(store),
        "vocabulary": store.manifest["vocabulary"],
        **({"labels": store.manifest["labels"]} if "labels" in store.manifest else {}),
    }
    file = workdir / RUN
    if file.exists() and has_checkpoint(workdir):
        before = read_about(workdir)
        if before["vocabulary"] != about["vocabulary"]:
            raise UserError(
                f"{store.folder} has another vocabulary than {workdir} was trained with: prepare it with "
                f"{own_vocabulary(before, workdir)}, or choose another --workdir"
            )
        if before["splits"]["train"] != about["splits"]["train"]:
            raise UserError(
                f"{store.folder} is not the data that {workdir} was trained on: restore it, or choose another --workdir"
            )
        source = before.get("from")
    about |= {"from": source} if source else {}
    store.vocabulary.save(workdir)
    write_text(file, json.dumps(about, indent=2))


def own_vocabulary(about: Mapping[str, Any], workdir: epath.Path) -> str:
    """How `prepare` is given the vocabulary of a run."""
    kind = about["vocabulary"]["kind"]
    files_of = {each.kind: each.file_name for each in (SentencePieceVocabulary, WordVocabulary)}
    if kind in files_of:
        return f"--vocabulary={workdir / files_of[kind]}"
    return "--vocabulary=bytes" if kind == ByteVocabulary.kind else f"a task of {kind}"


@dataclass(frozen=True)
class Run:
    """A run opened from its workdir; nothing is read before it is asked for. `at` gives the same at another step."""

    workdir: epath.Path
    settings: dict[str, Any]  # what its config built: model, rows, segment
    about: dict[str, Any]  # what was noted when it was started
    chosen: int | None = None  # a step, or the latest

    @property
    def model(self) -> nn.Module:
        return self.settings["model"]

    @property
    def config(self) -> str:
        """Its gin config, flat."""
        return (self.workdir / CONFIG).read_text()

    @property
    def metrics(self) -> list[dict[str, float]]:
        """A row for each line of its log: "step", and what was measured there."""
        return read_metrics(self.workdir / METRICS)

    @property
    def tells_labels(self) -> bool:
        """Whether it is a classifier, which predicts no tokens."""
        return hasattr(self.model.head, "classes")

    def need_text(self) -> None:
        """Refuses what only a language model of text can do."""
        if self.tells_labels or not self.vocabulary.is_text:
            kind = "tells labels" if self.tells_labels else f"is one of {self.vocabulary.kind}"
            raise UserError(f"{self.workdir} {kind}: only a language model of text can do this")

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        return saved_vocabulary(self.about["vocabulary"], str(self.workdir))

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        folder = self.workdir / "checkpoints"
        if not folder.is_dir():
            raise UserError(f"{self.workdir} has no checkpoint yet: train it first")
        return Checkpoints(folder)

    @functools.cached_property
    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint."""
        steps = self.checkpoints.steps()
        if not steps:
            raise UserError(f"{self.workdir} has no checkpoint yet: train it first")
        return steps

    @functools.cached_property
    def step(self) -> int:
        """The step whose parameters these are."""
        return self.steps[-1] if self.chosen is None else self.chosen

    @property
    def best(self) -> int:
        """The step of the lowest validation loss, of those that were evaluated in training and have a checkpoint."""
        return best_step(self.workdir, self.steps)

    def at(self, step: int | str | None) -> "Run":
        """The same run at another step; at the best for "best", at the latest for None."""
        if step == "best":
            return replace(self, chosen=self.best)
        if step is not None and step not in self.steps:
            there = ", ".join(map(str, self.steps))
            raise UserError(f"{self.workdir} has no checkpoint of step {step}: it has {there}")
        return replace(self, chosen=step)

    @functools.cached_property
    def params(self) -> Any:
        """The parameters, on one device of this process, whatever they were trained on."""
        return self.params_as(None)

    def params_as(self, dtype: Any) -> Any:
        """The parameters read anew, as bfloat16 or another type."""
        model, start = self.model, jnp.zeros((1, self.model.block), bool)
        shapes = jax.eval_shape(
            lambda: model.init(jax.random.key(0), model.blank(1, model.block), model.initial_state(1), start)
        )
        try:
            return self.checkpoints.restore_params(self.step, nn.unbox(shapes)["params"], dtype)
        except UserError as error:
            raise UserError(edited(self.workdir) or str(error)) from error

    def store(self, folder: str | None = None) -> Store:
        """The store the run was trained on, or another of the same vocabulary."""
        if folder is None and not is_store(place_of(self.about["store"])):
            raise UserError(
                f"{self.workdir} was trained on {self.about['store']}, which is not here: evaluate takes a copy of it "
                "by --store=FOLDER, or a text of yours by --text=FILE"
            )
        store = open_store(folder or self.about["store"])
        if store.manifest["vocabulary"] != self.about["vocabulary"]:
            raise UserError(
                f"{store.folder} has another vocabulary than {self.workdir}: prepare it with "
                f"{own_vocabulary(self.about, self.workdir)}"
            )
        if store.manifest.get("labels") != self.about.get("labels"):
            raise UserError(f"{store.folder} has other labels than {self.workdir} was trained to tell, or one has none")
        if folder is None and contents(store) != self.about["splits"]:
            raise UserError(
                f"{store.folder} has changed since {self.workdir} was trained: if you mean it, evaluate with "
                f"--store={store.folder}"
            )
        return store

    @functools.cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self.model)

    def stream(self, file: str | Path | None = None) -> Stream:
        """A document to be fed in pieces of any size; from a `file`, one that was put away by `save`."""
        self.need_text()
        config = hashlib.sha256(self.config.encode()).hexdigest()
        identity = {"config": config, "step": self.step, "vocabulary": self.about["vocabulary"]}
        return Stream(self._scorer, self.params, self.vocabulary, identity, file)

    def score(self, text: str | bytes) -> Scores:
        """What each token of a text costs, in bits, and where it is."""
        return self.stream().feed(text, last=True)

    def generate(
        self,
        prompt: str | Sequence[str] | Stream,
        tokens: int = 200,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        beams: int | None = None,
    ) -> str | list[str]:
        """Goes on from a text, from several side by side, or from where a stream stands; what is new of each.

        Tokens are drawn by `sampling`, at a temperature of 0.8 if nothing else is said; with `beams` the likeliest text
        is searched for. It ends before the first of the strings `stop`. A stream stays where it is: feed it what you
        want to keep.
        """
        self.need_text()
        if isinstance(prompt, Stream):
            prompt.flush()
            prompts, state = [prompt.last], prompt.state_before_last()
        else:
            several = [prompt] if isinstance(prompt, str) else prompt
            prompts, state = [self.vocabulary.encode(text.encode()) for text in several], None
        token_bytes, stops = self.vocabulary.token_bytes, [text.encode() for text in stop]
        if beams is None:
            drawn = self.generator(sampling or Sampling(0.8))(prompts, tokens, seed, state)
            pieces = zip(*texts_of(drawn, token_bytes, stops), strict=True)
        else:
            search = BeamSearch(self.model, self.params, beams, banned=self.silent)
            found = (search(each, tokens, ends_in_stop(token_bytes, stops), state)[0][0] for each in prompts)
            pieces = ([new for (new,) in texts_of([[i] for i in text], token_bytes, stops)] for text in found)
        texts = [b"".join(row).decode(errors="replace") for row in pieces]
        return texts[0] if isinstance(prompt, str | Stream) else texts

    def generator(self, sampling: Sampling) -> Generator:
        """The model ready to generate, compiled once for each way to sample."""
        if sampling not in self._generators:
            self._generators[sampling] = Generator(self.model, self.params, sampling, self.silent)
        return self._generators[sampling]

    @functools.cached_property
    def _generators(self) -> dict[Sampling, Generator]:
        return {}

    @functools.cached_property
    def silent(self) -> list[int]:
        """Ids without text, which are never drawn: padding, specials, what only rounds the vocabulary up."""
        known = self.vocabulary
        return [i for i in range(self.model.vocabulary_size) if i >= known.size or not known.token_bytes(i)]

    def states(self, text: str | bytes) -> dict[str, np.ndarray]:
        """What every layer shows of itself over a text: block_recurrent/inference/inspection.py says what."""
        self.need_text()
        tokens = self.vocabulary.encode(text.encode() if isinstance(text, str) else text)
        return inside(self.model, self.params, tokens)

    def split(self, name: str = "test", store: str | None = None) -> Split | Mixture:
        """A split of the run's own store, or of another of the same vocabulary."""
        return self.store(store).split(name)

    def training_split(self, store: str | None = None) -> Split | Mixture:
        """What the run was trained on; where that is not there any more, the training split of another store."""
        try:
            return self.split("train")
        except UserError:
            if store is None:
                raise
            return self.split("train", store)

    def evaluate(
        self,
        split: str = "test",
        store: str | None = None,
        texts: Mapping[str, bytes] | None = None,
        rows: int | None = None,
        reset_every: int | None = None,
        learning: Learning | None = None,
        progress: Callable = lambda done, total: None,
        statistics_progress: Callable = lambda done, total: None,
    ) -> Measured | MeasuredLabels:
        """Measures a split, or `texts` by their names, document by document; of a classifier, the labels it tells.

        With `reset_every` the model forgets everything after so many blocks; with `learning` it goes on learning,
        once it has read the training split for its gradients.
        """
        if self.tells_labels and (texts is not None or reset_every or learning):
            raise UserError(
                f"{self.workdir} tells labels, which a text of yours has not: it is evaluated on a split alone"
            )
        if texts is not None or learning:
            self.need_text()
        if texts is not None:
            data, names = split_in_memory(texts.values(), self.vocabulary), list(texts)
        else:
            opened = self.store(store)
            data, names = opened.split(split), opened.document_names(split)
        if learning:
            segment = max(self.model.block, 5)  # the authors' five words, or a block
            train = self.training_split(store)
            evaluator = DynamicEvaluator(self.model, segment, train, learning, statistics_progress)
        else:
            # Few documents in few rows, in longer segments: as many tokens at once, and by the law of chunks the same.
            documents = sum(len(part.lengths) for part, _ in data.parts)
            rows = rows or max(min(self.settings["rows"], documents), 1)
            require_room("give fewer --rows", states_of_rows=jax.eval_shape(lambda: self.model.initial_state(rows)))
            segment = self.settings["segment"] * max(self.settings["rows"] // rows, 1)
            evaluator = Evaluator(self.model, rows, segment, uncut=True, reset_every=reset_every)
        if self.tells_labels:
            return measure_labels(evaluator, self.params, data, opened.manifest["labels"], names, progress)
        task = None if texts is not None else opened.manifest.get("task")
        return measure(evaluator, self.params, data, self.vocabulary, names, progress, task)

    def history(self, split: str = "test", store: str | None = None, **how: Any) -> HistoryCurve:
        """How much the model makes of its past: block_recurrent/inference/history.py."""
        self.need_text()
        return history_curve(self.model, self.params, self.split(split, store), **how)


def open_run(workdir: str | Path, trust: Sequence[str] = (), bindings: Sequence[str] = ()) -> Run:
    """Opens a workdir; `trust` names packages beyond this project that its config may import.

    `bindings` change its config, NAME=VALUE each, where that leaves the parameters as they are: CONTEXT=3072.
    """
    workdir = existing_run(workdir)
    load_config(workdir, trust, bindings)
    return Run(workdir, bindings_of(TRAIN, "model", "rows", "segment"), read_about(workdir))


def open_weights(workdir: str | Path) -> Run:
    """Opens a workdir for its checkpoints and notes alone: nothing of its config is built, and the parsed one stays."""
    workdir = existing_run(workdir)
    return Run(workdir, {}, read_about(workdir))


def existing_run(place: str | Path) -> epath.Path:
    """The folder of a run that is there."""
    workdir = run_folder(place)
    files.require_contained(workdir)
    if not (workdir / CONFIG).is_file():
        raise UserError(f"{workdir} is not a run: {what_it_is(workdir)}")
    try:
        (workdir / CONFIG).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{workdir / CONFIG} is not text ({error}): {workdir} is not a complete run") from error
    return workdir


def read_metrics(file: epath.Path) -> list[dict]:
    """The rows of a metrics file; what a kill or a full disk has cut short, or was never a row, is left out."""
    rows = []
    for line in file.read_bytes().splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def best_step(workdir: epath.Path, steps: Sequence[int]) -> int:
    """Of steps that have a checkpoint, the one of the lowest validation loss in training."""
    rows = read_metrics(workdir / METRICS)
    losses = {row["step"]: loss for row in rows if (loss := held_out_loss(row)) is not None}
    if not losses:
        raise UserError(f"{workdir} was not evaluated in training, so none of its steps is the best")
    there = [step for step in steps if step in losses]
    if not there:
        raise UserError(
            f"no step of {workdir} that was evaluated in training has a checkpoint: choose one of "
            f"{', '.join(map(str, steps))}; train makes one of each new best with --gin.train.keep_best=True"
        )
    return min(there, key=losses.__getitem__)


def held_out_loss(row: Mapping[str, float]) -> float | None:
    """The validation loss of a row of metrics, in nats per prediction; None for a row of training."""
    loss, bits = row.get("validation_loss"), row.get("validation_bits_per_token")  # all that older runs tell
    if isinstance(loss, int | float):
        return math.inf if math.isnan(loss) else loss
    return bits * math.log(2) if isinstance(bits, int | float) else None


def source_of(about: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a run noted of the one whose parameters it began with; None of a run that began with none, or damaged it."""
    source = about.get("from")
    kinds = {"run": str, "step": int, "parameters": str, "fresh": list}
    whole = isinstance(source, dict) and all(isinstance(source.get(name), kind) for name, kind in kinds.items())
    return source if whole else None


def read_about(workdir: epath.Path) -> dict[str, Any]:
    """What save_run noted."""
    try:
        about = json.loads((workdir / RUN).read_bytes())
        noted = {"command": str, "store": str, "splits": dict, "vocabulary": dict}
        if not isinstance(about, dict) or not all(isinstance(about.get(name), kind) for name, kind in noted.items()):
            raise ValueError("it lacks what every run notes")
        return about
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{workdir / RUN} cannot be read ({error}): {workdir} is not a complete run") from error
