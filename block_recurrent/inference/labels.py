"""A split of labelled sequences measured: how many labels are told right, class by class, and how sure that is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from block_recurrent.data.store import Mixture, Split
from block_recurrent.inference.evaluation import Evaluator, Score
from block_recurrent.inference.measuring import Interval, Texts
from block_recurrent.inference.statistics import ratio_interval


@dataclass(frozen=True)
class MeasuredLabels:
    """What was found, in total and sequence by sequence, in the split's order."""

    score: Score
    classes: tuple[str, ...]
    names: tuple[str, ...]
    labels: np.ndarray  # [documents]
    nats: np.ndarray  # [documents] that the label cost
    hits: np.ndarray  # [documents] whether it was the likeliest

    def interval(self) -> Interval:
        """Where the accuracy would lie with other sequences of this kind, with a probability of 95 %."""
        return ratio_interval(self.hits, np.ones_like(self.hits))

    def by_class(self) -> list[dict]:
        found = []
        for label, name in enumerate(self.classes):
            hits = self.hits[self.labels == label]
            if len(hits):
                interval = ratio_interval(hits, np.ones_like(hits))
                found.append(
                    {"of": name, "documents": len(hits), "accuracy": float(np.mean(hits)), "interval": interval}
                )
        return found

    def to_json(self) -> dict:
        told = self.score.to_json()
        per_document = {"name": self.names, "label": self.labels, "nats": self.nats, "hit": self.hits.astype(int)}
        return {
            **{name: told[name] for name in ("nats_per_token", "accuracy", "hits", "nats", "documents")},
            "accuracy_interval": self.interval(),
            "by_class": self.by_class(),
            "per_document": {name: np.asarray(values).tolist() for name, values in per_document.items()},
        }


def measure_labels(
    evaluator: Evaluator,
    params,
    split: Split | Mixture,
    classes: Sequence[str],
    names: Sequence[str] | None = None,
    progress: Callable = lambda done, total: None,
) -> MeasuredLabels:
    """Evaluates a split and keeps what each sequence gave, at its last token."""
    stream = evaluator.stream(split)
    texts = Texts(stream)
    labels = np.concatenate([part.split.labels[part.whole] for part in stream.parts])
    lengths = np.concatenate([part.end - part.begin for part in stream.parts])
    nats, hits, done = np.zeros(len(texts)), np.zeros(len(texts)), 0
    for span, losses, right in evaluator.losses_and_hits(params, stream):
        document = texts.number(span.part, span.document)
        if span.offset + span.count == lengths[document]:
            nats[document], hits[document] = losses[-1], right[-1]
        done += span.count
        progress(done, stream.inputs)
    score = Score(float(nats.sum()), len(texts), len(texts), 1.0, 0.0, hits=int(hits.sum()))
    chosen = tuple(str(names[i]) if names else str(i) for i in texts.places)
    return MeasuredLabels(score, tuple(classes), chosen, labels, nats, hits)
