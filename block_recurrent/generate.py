"""Generates text from a run, as it is drawn; of several samples the first, and then the others one by one.

python -m block_recurrent.generate runs/quickstart --prompt='def '
python -m block_recurrent.generate runs/quickstart --prompt='import ' --prompt='class ' --samples=2 --top_p=0.9
python -m block_recurrent.generate runs/quickstart --prompt='def ' --beams=4 --stop='return'
python -m block_recurrent.generate runs/quickstart --prompt_file=long.py --save=here.npz     # and later, from there:
python -m block_recurrent.generate runs/quickstart --go_on=here.npz
"""

import argparse
import codecs
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from block_recurrent.commandline import Parser, command_parser, step
from block_recurrent.errors import UserError, run_command
from block_recurrent.ranges import POSITIVE, RATE, SEED, SHARE, WHOLE_1, Range

DRAWING = ("samples", "seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
OF_CHANCE = ("samples", "seed", "top_k", "top_p", "min_p")  # what the likeliest token does not depend on
LONG, SHOWN = 500, 200  # characters: of a prompt longer than that, so many are shown


def parser() -> Parser:
    made = command_parser("generate", __doc__)
    made.add_argument("workdir", help="the run's folder, or gs://...")
    made.add_argument("--prompt", action="append", help="text to go on from; several are continued side by side")
    made.add_argument("--prompt_file", action="append", type=Path, help="a file to go on from")
    made.add_argument("--tokens", type=WHOLE_1, default=500, help="how many new tokens a sample gets")
    made.add_argument("--samples", type=WHOLE_1, help="samples of each prompt (default: 1)")
    made.add_argument("--temperature", type=RATE, help="0 takes the likeliest token (default: 0.8)")
    made.add_argument("--top_k", type=WHOLE_1, help="draw from so many of the likeliest tokens")
    made.add_argument("--top_p", type=Range(above=0, most=1), help="draw from the likeliest that together reach it")
    made.add_argument("--min_p", type=SHARE, help="the least probability, as a share of the likeliest token's")
    made.add_argument("--repetition_penalty", type=POSITIVE, help="more than 1 makes repeats rarer")
    made.add_argument("--seed", type=SEED, help="of the draws (default: 0)")
    made.add_argument("--stop", action="append", default=[], help="a text before which a sample ends; may repeat")
    made.add_argument(
        "--beams", type=WHOLE_1, help="search for the likeliest text with so many beams; nothing is drawn"
    )
    made.add_argument("--save", type=Path, metavar="FILE", help="put the text's state away, to go on from later")
    made.add_argument("--go_on", type=Path, metavar="FILE", help="go on from what --save put away")
    made.add_argument("--step", type=step, help="a checkpoint's step, or best (default: the latest)")
    made.add_argument("--trust", action="append", help="a package that the run's config may import")
    return made


def check(options: argparse.Namespace) -> None:
    """Refuses flags that cannot act together."""
    drawing = [name for name in DRAWING if getattr(options, name) is not None]
    if options.beams is not None and drawing:
        raise UserError(f"--beams searches and draws nothing: leave out --{drawing[0]}, or --beams")
    without_effect = [name for name in drawing if name in OF_CHANCE]
    if options.temperature == 0 and without_effect:
        raise UserError(f"--temperature=0 takes the likeliest token and draws nothing: leave out --{without_effect[0]}")
    prompts = [*(options.prompt or []), *(options.prompt_file or [])]
    if (options.save or options.go_on) and (len(prompts) > 1 or (options.samples or 1) > 1 or options.beams):
        raise UserError("--save and --go_on are for one text: leave out --beams, --samples and further prompts")
    if options.go_on and options.repetition_penalty is not None:
        raise UserError("--repetition_penalty does not know the text before --go_on: leave it out")
    if "" in options.stop:
        raise UserError("a --stop is empty: give the text before which a sample ends")


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    check(options)

    from block_recurrent.inference.generation import Sampling
    from block_recurrent.inference.run import open_run

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    drawing = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    sampling = Sampling(**{"temperature": 0.8, **drawing})
    run = open_run(options.workdir, options.trust or ()).at(options.step)
    run.need_text()
    prompts, samples = prompts_of(options), options.samples or 1
    require_rows(run, options.beams or len(prompts) * samples)
    try:
        encoded = [run.vocabulary.encode(text.encode()) for text in prompts for _ in range(samples)]
        stops = [stop.encode() for stop in options.stop]
    except UnicodeEncodeError as error:
        raise UserError("a --prompt or --stop is not UTF-8: check the terminal's locale") from error
    headers = headers_of(len(prompts), samples)
    shown = [text for text in map(shown_of, prompts) for _ in range(samples)]
    if options.save or options.go_on:
        print_first(headers, shown, continued(run, options, sampling, prompts[0], stops))
    elif options.beams is None:
        from block_recurrent.inference.stop_strings import texts_of

        drawn = run.generator(sampling)(encoded, options.tokens, options.seed or 0)
        print_first(headers, shown, texts_of(drawn, run.vocabulary.token_bytes, stops))
    else:
        for header, text, found in zip(headers, shown, likeliest(run, options, encoded, stops), strict=True):
            print_first([header], [text], found)


def require_rows(run: Any, rows: int) -> None:
    """Refuses more texts at a time than there is memory for their states."""
    import jax

    from block_recurrent.device_memory import require_room

    state = jax.eval_shape(lambda: run.model.initial_state(rows))
    require_room("give fewer --samples, --beams or prompts", states_of_texts=state)


def prompts_of(options: argparse.Namespace) -> list[str]:
    """The texts to go on from."""
    from block_recurrent.data.sources import read_utf8

    files = [read_utf8(file).decode() for file in options.prompt_file or []]
    return [*(options.prompt or []), *files] or ([""] if options.go_on else ["\n"])


def continued(run: Any, options: argparse.Namespace, sampling: Any, text: str, stops: list[bytes]) -> Iterator:
    """New bytes of one text that goes on from a file, is put away into one, or both."""
    from block_recurrent.inference.stop_strings import texts_of

    stream = run.stream(options.go_on)
    stream.feed(text, last=True)
    drawn = run.generator(sampling)([stream.last], options.tokens, options.seed or 0, stream.state_before_last())
    written = b""
    for contents in texts_of(drawn, run.vocabulary.token_bytes, stops):
        yield contents
        written += contents[0]
    if options.save:
        stream.feed(written, last=True)
        stream.save(options.save)


def likeliest(run: Any, options: argparse.Namespace, prompts: list, stops: list[bytes]) -> Iterator[Iterator]:
    """The bytes of each prompt's best beam."""
    from block_recurrent.inference.beams import BeamSearch
    from block_recurrent.inference.stop_strings import ends_in_stop, texts_of

    token_bytes = run.vocabulary.token_bytes
    search = BeamSearch(run.model, run.params, options.beams, banned=run.silent)
    for prompt in prompts:
        best, _ = search(prompt, options.tokens, ends_in_stop(token_bytes, stops))[0]
        yield texts_of([[token] for token in best], token_bytes, stops)


def headers_of(prompts: int, samples: int) -> list[str]:
    """A line above each text; none above a single one."""
    counts = (("prompt", prompts), ("sample", samples))
    if prompts == samples == 1:
        return [""]
    named = [[f"{name} {i + 1} of {count}" for i in range(count)] for name, count in counts if count > 1]
    return [f"--- {', '.join(names)} ---" for names in itertools.product(*named)]


def shown_of(prompt: str) -> str:
    """A prompt as it is printed before what follows: the end of a long one."""
    if len(prompt) <= LONG:
        return prompt
    print(f"the prompt has {len(prompt):,} characters; here are the last {SHOWN}", file=sys.stderr)
    return prompt[-SHOWN:]


def print_first(headers: list[str], prompts: list[str], contents: Iterator[list[bytes]]) -> None:
    """Prints the first text as it comes, and then the others, each whole."""
    first, *others = (codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in prompts)
    texts: list[list[str]] = [[] for _ in others]
    begin(headers[0], prompts[0])
    for content, *rest in contents:
        print(first.decode(content), end="", flush=True)
        for text, other, new in zip(texts, others, rest, strict=True):
            text.append(other.decode(new))
    print(first.decode(b"", final=True), flush=True)
    for header, prompt, text, other in zip(headers[1:], prompts[1:], texts, others, strict=True):
        begin(header, prompt)
        print("".join(text) + other.decode(b"", final=True), flush=True)


def begin(header: str, prompt: str) -> None:
    print(f"{header}\n{prompt}" if header else prompt, end="", flush=True)


if __name__ == "__main__":
    run_command(main)
