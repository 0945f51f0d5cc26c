"""Generation, one stream on CPU: tokens a second beside PyTorch's, and whether a token costs more at a later position.

python -m benchmarks.generation                    # beside the package block-recurrent-transformer-pytorch
python -m benchmarks.generation --part=positions   # law 11: at position 10,000 a token costs what it does at 100

One JSON line for each case, medians of repetitions that take turns. PyTorch's side needs
pip install -r requirements-benchmarks.txt, and is left out with a message where it is absent. Its `generate` runs the
model over all of a segment so far for every token: so its tokens are timed at places all over a segment. What was
measured is in benchmarks/generation.md.
"""

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.interleaved import medians
from benchmarks.torch_recurrences import package
from block_recurrent.inference.generation import Generator, Sampling
from block_recurrent.kept_memory import keep_memory
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import pattern, stack
from block_recurrent.ranges import WHOLE_1
from models.block_recurrent_transformer import BlockRecurrentLayer
from models.feedback import feedback_stack
from models.sliding_window import SlidingWindowLayer

VOCABULARY, DIM, WINDOW = 256, 256, 128
SIZES = {"heads": 4, "head_dim": 64, "mlp_dim": 1024, "window": WINDOW}
LAYERS = {"slide": SlidingWindowLayer(**SIZES), "rec": BlockRecurrentLayer(**SIZES, states=WINDOW, dim=DIM)}
MODELS = {
    "Slide": stack(pattern("4*slide", LAYERS)),
    "Rec:fixed:skip": stack(pattern("2*slide rec slide", LAYERS)),
    "Feedback:fixed:skip": feedback_stack(pattern("2*slide rec slide", LAYERS)),
}


PLACES = 8  # in a segment, at which PyTorch's tokens are timed


def generator_of(name: str) -> Generator:
    model = LanguageModel(VOCABULARY, DIM, MODELS[name])
    tokens = jnp.zeros((1, model.block), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens, model.initial_state(1), tokens.astype(bool))
    return Generator(model, nn.unbox(variables)["params"], Sampling())


def advance(stream: Iterator, tokens: int) -> None:
    for _ in range(tokens):
        next(stream)


def positions(name: str, options: argparse.Namespace) -> None:
    """A block of tokens from each position on, by streams that take turns."""
    generator = generator_of(name)
    streams = {position: generator([[1]], tokens=position + 10**6) for position in options.positions}
    for position, stream in streams.items():
        advance(stream, position)
    seconds = medians({at: partial(advance, stream, WINDOW) for at, stream in streams.items()}, options.repetitions)
    for position, block in seconds.items():
        ratio = block / seconds[options.positions[0]]
        report(model=name, position=position, tokens_per_second=WINDOW / block, ratio_to_first=ratio)


def beside_pytorch(name: str, options: argparse.Namespace) -> None:
    """A block of our tokens, and one of PyTorch's at each of some places in a segment."""
    generator = generator_of(name)
    for segment in options.segments:
        cases = {"ours": partial(advance, generator([[1]], tokens=10**6), WINDOW)}
        if theirs := pytorch_tokens(segment, options.threads):
            cases["pytorch"] = theirs
        seconds = medians(cases, options.repetitions)
        speeds = {"tokens_per_second": WINDOW / seconds["ours"]}
        if theirs:
            speeds["pytorch_tokens_per_second"] = PLACES / seconds["pytorch"]
            speeds["times_pytorch"] = speeds["tokens_per_second"] / speeds["pytorch_tokens_per_second"]
        report(model=name, pytorch_segment=segment, pytorch_threads=options.threads, **speeds)


def pytorch_tokens(segment: int, threads: int) -> Callable[[], None] | None:
    """Draws tokens with the package's model of our sizes; None without it."""
    torch, theirs = package("torch"), package("block_recurrent_transformer_pytorch")
    if not (torch and theirs):
        return None
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of PyTorch, about the package's attention
    model = theirs.BlockRecurrentTransformer(
        num_tokens=VOCABULARY,
        dim=DIM,
        depth=4,
        heads=SIZES["heads"],
        dim_head=SIZES["head_dim"],
        block_width=WINDOW,
        num_state_vectors=WINDOW,
        recurrent_layers=(3,),
        max_seq_len=segment,
        use_flash_attn=True,  # its faster way
    )
    texts = [torch.ones(1, segment * (2 * place + 1) // (2 * PLACES), dtype=torch.long) for place in range(PLACES)]

    def draw() -> None:
        for text in texts:
            model.generate(text, text.shape[1] + 1)

    return draw


def report(**values) -> None:
    """A line, with numbers to three digits."""
    print(
        json.dumps({name: float(f"{v:.3g}") if isinstance(v, float) else v for name, v in values.items()}), flush=True
    )


PARTS = {"pytorch": beside_pytorch, "positions": positions}


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.generation", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, default="pytorch")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Rec:fixed:skip"])
    parser.add_argument(
        "--segments", type=WHOLE_1, nargs="+", default=[1024, 128], help="PyTorch's; its default is 1024"
    )
    parser.add_argument("--threads", type=WHOLE_1, default=2, help="PyTorch's; 1 where other work has the cores")
    parser.add_argument("--positions", type=WHOLE_1, nargs="+", default=[100, 10_000])
    parser.add_argument("--repetitions", type=WHOLE_1, default=7)
    options = parser.parse_args()
    for name in options.models:
        PARTS[options.part](name, options)


if __name__ == "__main__":
    keep_memory()
    main()
