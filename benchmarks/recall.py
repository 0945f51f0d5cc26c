"""Do a recurrence and a memory remember? Facts stated once are asked for far beyond what any window can reach.

python -m benchmarks.recall --output=runs/recall

A document states a value for each of a few keys in its first block, then is noise, and asks for the keys again and
again; no answer is ever shown. A model that has forgotten knows nothing of the 16 values: 4 bits.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax

from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import pattern, stack
from block_recurrent.plots import draw
from block_recurrent.ranges import SEED
from block_recurrent.training.optimizers import adafactor
from block_recurrent.training.sharding import make_mesh
from block_recurrent.training.step import Trainer
from models.block_recurrent_transformer import BlockRecurrentLayer
from models.memorizing_transformer import MemorizingLayer
from models.sliding_window import SlidingWindowLayer

VALUES = 16
NOISE = 8
MODELS = {"sliding window": "3*slide", "block-recurrent": "slide rec slide", "memorizing": "slide mem slide"}


@dataclass(frozen=True)
class Recall:
    """The task: `facts` keys, each with one of VALUES values; `questions` in every later block of `window` tokens."""

    window: int = 8
    facts: int = 4
    questions: int = 3

    @property
    def vocabulary(self) -> int:
        return VALUES + self.facts + 1 + NOISE  # values, keys, the question mark, noise

    def documents(self, rng: np.random.Generator, rows: int, blocks: int) -> dict[str, np.ndarray]:
        """A batch of documents, one a row; the weights are 1 where a question wants its answer."""
        first_key, question_mark, noise = VALUES, VALUES + self.facts, VALUES + self.facts + 1
        tokens = rng.integers(noise, noise + NOISE, (rows, blocks, self.window), np.int32)
        targets, weights = np.zeros_like(tokens), np.zeros(tokens.shape, np.float32)

        values = rng.integers(0, VALUES, (rows, self.facts), np.int32)
        order = rng.permuted(np.tile(np.arange(self.facts), (rows, 1)), axis=1)
        tokens[:, 0, 0 : 2 * self.facts : 2] = first_key + order
        tokens[:, 0, 1 : 2 * self.facts : 2] = np.take_along_axis(values, order, axis=1)

        places = np.tile(np.arange(0, self.window, 2), (rows, blocks - 1, 1))
        places = rng.permuted(places, axis=2)[:, :, : self.questions]
        keys = rng.integers(0, self.facts, places.shape)
        row, block = np.arange(rows)[:, None, None], np.arange(1, blocks)[None, :, None]
        tokens[row, block, places] = question_mark
        tokens[row, block, places + 1] = first_key + keys
        targets[row, block, places + 1] = values[row, keys]
        weights[row, block, places + 1] = 1.0

        batch = {"inputs": tokens, "targets": targets, "weights": weights}
        batch = {name: array.reshape(rows, -1) for name, array in batch.items()}
        return {**batch, "start": np.arange(blocks * self.window) == np.zeros((rows, 1))}


def model_of(
    task: Recall, spec: str, dim: int = 64, states: int = 8, gate: str = "lstm", memory: int = 128
) -> LanguageModel:
    sizes = {"heads": 4, "head_dim": dim // 4, "mlp_dim": 4 * dim, "window": task.window}
    layers = {
        "slide": SlidingWindowLayer(**sizes),
        "rec": BlockRecurrentLayer(**sizes, states=states, dim=dim, gate=gate),
        "mem": MemorizingLayer(**sizes, memory=memory),
    }
    return LanguageModel(task.vocabulary, dim, stack(pattern(spec, layers)))


def bits_by_block(model: LanguageModel, task: Recall, blocks: int, rows: int, batches: int = 4) -> Callable:
    """A function of parameters: bits per answer asked for in each block after the first, on documents never seen."""
    rng = np.random.default_rng(2**31)
    held_out = [task.documents(rng, rows, blocks) for _ in range(batches)]

    @jax.jit
    def weighed(params, batch):
        state = model.initial_state(rows)
        losses, _ = model.apply(
            {"params": params}, batch["inputs"], batch["targets"], state, batch["start"], method="losses"
        )
        in_blocks = (losses * batch["weights"], batch["weights"])
        return [a.reshape(rows, blocks, -1).sum((0, 2)) for a in in_blocks]

    def measure(params) -> np.ndarray:
        nats, answers = (sum(parts) for parts in zip(*(weighed(params, batch) for batch in held_out), strict=True))
        return np.asarray(nats)[1:] / np.asarray(answers)[1:] / np.log(2)

    return measure


def learn(
    model: LanguageModel,
    task: Recall,
    stages: list[tuple[int, int]],
    far: int,
    rows: int = 32,
    peak: float = 0.03,
    seed: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[list[int], list[float], np.ndarray]:
    """Trains through `stages` of (blocks of a document, most steps): steps, bits far from the facts, bits by block.

    A stage ends early once its documents are known, to 0.02 bits. Far is `far` blocks and more after the facts, in
    documents of the last stage's length.
    """
    measure = bits_by_block(model, task, stages[-1][0], rows)
    optimizer = adafactor(optax.linear_schedule(0.0, peak, transition_steps=100), clip=1.0)
    trainer = Trainer(model, optimizer, make_mesh(), rows)
    state, rng = trainer.init(seed), np.random.default_rng(seed)
    along, up = [], []
    for blocks, most in stages:
        for done in range(1, most + 1):
            state, metrics = trainer.step(state, task.documents(rng, rows, blocks))
            if done % 50 == 0 or done == most:
                training, by_block = float(metrics["loss"]) / np.log(2), measure(state.params)
                along.append(int(state.step))
                up.append(float(by_block[far - 1 :].mean()))
                log(f"step {along[-1]}: {training:.3f} bits in documents of {blocks} blocks, {up[-1]:.3f} far away")
                if training < 0.02:
                    break
    return along, up, by_block


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.recall", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/recall"))
    parser.add_argument("--seed", type=SEED, default=0)
    parser.add_argument("--gate", default="lstm", choices=["lstm", "fixed"])
    options = parser.parse_args()
    task, stages, far = Recall(), [(4, 1000), (16, 200)], 8
    curves, by_block = {}, {}
    for name, spec in MODELS.items():
        began = time.perf_counter()
        model = model_of(task, spec, gate=options.gate)
        along, up, bits = learn(
            model,
            task,
            stages,
            far,
            seed=options.seed,
            log=lambda line, name=name: print(f"{name}, {line}", flush=True),
        )
        curves[name], by_block[name] = (along, up), (list(range(1, len(bits) + 1)), bits)
        line = {
            "model": name,
            "layers": spec,
            "bits_per_answer": round(up[-1], 3),
            "asked_after_tokens": far * task.window,
            "window_times_layers": 3 * task.window,
            "seconds": round(time.perf_counter() - began),
        }
        print(json.dumps(line), flush=True)
    picture = options.output / "recall.png"
    draw(picture, "facts recalled, bits per answer (chance: 4)", {f"asked {far} blocks later or more": curves})
    draw(
        options.output / "by_distance.png",
        "facts recalled, bits per answer",
        {"after training": by_block},
        "blocks since the facts were stated",
    )
    print(f"curves: {picture} {options.output / 'by_distance.png'}")


if __name__ == "__main__":
    main()
