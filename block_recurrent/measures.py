"""What a run is judged by, and what that is called: a language model, one of music, or one that tells labels."""

import math
from dataclasses import dataclass

BITS = math.log(2)  # nats


@dataclass(frozen=True)
class Measure:
    """A figure of an evaluation: something of its documents, summed, by how much of them there is."""

    name: str
    source: str  # where `evaluate` writes it
    interval: str | None = None  # and its interval
    factor: float = 1.0  # to it from what is written there
    of: str = "nats"  # what is summed over documents
    per: str | None = "tokens"  # what is counted in them; None for the documents themselves
    unit: float = 1.0  # of it, in what is summed
    held_out: str | None = None  # where `train` writes it, in the course of training
    difference: str = ""  # how a column of differences is headed
    layout: str = ".3f"
    exact: str = ".4f"  # where there is room

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True)
class Kind:
    """Runs that are judged alike."""

    position: str  # what is read one after another
    prediction: str  # what is told of them
    documents: str
    described: tuple[tuple[str, str], ...]  # what else `evaluate` writes of a document, and what that is called
    measures: tuple[Measure, ...]

    @property
    def loss(self) -> Measure:
        """What training minimises."""
        return self.measures[0]

    @property
    def main(self) -> Measure:
        """What counts."""
        return self.measures[-1]

    @property
    def held_out(self) -> list[Measure]:
        """What is measured in the course of training."""
        return [measure for measure in self.measures if measure.held_out]


BITS_PER_TOKEN = Measure("bits_per_token", "bits_per_token", "bits_per_token_interval", unit=BITS)
BITS_PER_BYTE = Measure(
    "bits_per_byte",
    "bits_per_byte",
    per="bytes",
    unit=BITS,
    held_out="validation_bits_per_byte",
    difference="difference per byte",
)
NATS_PER_FRAME = Measure(
    "nats_per_frame",
    "bits_per_token",
    "bits_per_token_interval",
    factor=BITS,
    held_out="validation_loss",
    difference="difference per frame",
)
NATS_PER_LABEL = Measure("nats_per_label", "nats_per_token", per=None, held_out="validation_loss")
ACCURACY = Measure(
    "accuracy",
    "accuracy",
    "accuracy_interval",
    of="hit",
    per=None,
    held_out="validation_accuracy",
    difference="difference in points",
    layout=".2%",
    exact=".2%",
)

TEXT = Kind("token", "token", "documents", (("tokens", "tokens"), ("bytes", "bytes")), (BITS_PER_TOKEN, BITS_PER_BYTE))
MUSIC = Kind("frame", "frame", "documents", (("tokens", "frames"),), (NATS_PER_FRAME,))
LABELS = Kind("token", "label", "sequences", (("label", "class"),), (NATS_PER_LABEL, ACCURACY))


def kind_of(data: dict) -> Kind:
    """The kind of what is trained on a store, by its manifest or by what a run has noted of it."""
    if "labels" in data:
        return LABELS
    return MUSIC if data["vocabulary"]["kind"] == "notes" else TEXT


def kind_with(figures: dict) -> Kind:
    """The kind of a comparison's entry, by what it has been judged by."""
    return next((kind for kind in (MUSIC, LABELS) if kind.main.name in figures), TEXT)
