"""The package block-recurrent-transformer-pytorch as a contender: its step by Adam, and its generation."""

import argparse
import warnings

import torch
from block_recurrent_transformer_pytorch import BlockRecurrentTransformer
from serving import serve

SIZES = {
    "small": {"dim": 256, "heads": 4, "window": 128, "segment": 1024, "rows": 2, "vocabulary": 256, "depth": 4},
    "base": {"dim": 512, "heads": 8, "window": 256, "segment": 2048, "rows": 1, "vocabulary": 32000, "depth": 12},
}
RECURRENT = {"small": 3, "base": 10}  # counted from one
PLACES = 8  # in a segment, at which tokens are timed: the model runs over all of the segment so far for each


def model_of(size: str, segment: int) -> torch.nn.Module:
    s = SIZES[size]
    return BlockRecurrentTransformer(
        num_tokens=s["vocabulary"],
        dim=s["dim"],
        depth=s["depth"],
        heads=s["heads"],
        dim_head=64,
        block_width=s["window"],
        num_state_vectors=s["window"],
        recurrent_layers=(RECURRENT[size],),
        max_seq_len=segment,
        use_flash_attn=True,  # its faster way
    )


def step(options: argparse.Namespace) -> None:
    s = SIZES[options.size]
    model = model_of(options.size, s["segment"])
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    tokens = torch.randint(0, s["vocabulary"], (s["rows"], s["segment"] + 1))

    def run() -> None:
        optimizer.zero_grad()
        loss, *_ = model(tokens, return_loss=True)
        loss.backward()
        optimizer.step()

    serve(run, s["rows"] * s["segment"], sum(p.numel() for p in model.parameters()))


def generation(options: argparse.Namespace) -> None:
    segment = options.segment
    model = model_of("small", segment)
    lengths = [segment * (2 * place + 1) // (2 * PLACES) for place in range(PLACES)]
    texts = [torch.ones(options.rows, length, dtype=torch.long) for length in lengths]

    def run() -> None:
        for text in texts:
            model.generate(text, text.shape[1] + 1)

    serve(run, PLACES * options.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["step", "generation"])
    parser.add_argument("--size", default="small")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--segment", type=int, default=1024, help="its default is 1024")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of PyTorch, about the package's attention
    torch.set_num_threads(options.threads)
    {"step": step, "generation": generation}[options.part](options)


if __name__ == "__main__":
    main()
