"""Generates text from a run, as it is drawn.

python -m block_recurrent.generate runs/quickstart --prompt='def '
python -m block_recurrent.generate runs/quickstart --prompt='import ' --prompt='class ' --samples=2 --top_p=0.9
python -m block_recurrent.generate runs/quickstart --prompt='def ' --beams=4 --stop='return'
python -m block_recurrent.generate runs/quickstart --prompt_file=long.py --save=here.npz     # and later, from there:
python -m block_recurrent.generate runs/quickstart --go_on=here.npz
"""

import codecs
from pathlib import Path

from block_recurrent.commandline import command_parser, step
from block_recurrent.errors import UserError, run_command

DRAWING = ("samples", "seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def main(arguments: list[str]) -> None:
    parser = command_parser("generate", __doc__)
    parser.add_argument("workdir", help="the run's folder, or gs://...")
    parser.add_argument("--prompt", action="append", help="text to go on from; several are continued side by side")
    parser.add_argument("--prompt_file", action="append", type=Path, help="a file to go on from")
    parser.add_argument("--tokens", type=int, default=500, help="how many new tokens a sample gets")
    parser.add_argument("--samples", type=int, help="samples of each prompt (default: 1)")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top_k", type=int)
    parser.add_argument("--top_p", type=float)
    parser.add_argument("--min_p", type=float, help="the least probability, as a share of the likeliest token's")
    parser.add_argument("--repetition_penalty", type=float, help="more than 1 makes repeats rarer")
    parser.add_argument("--seed", type=int, help="of the draws (default: 0)")
    parser.add_argument("--stop", action="append", default=[], help="a text before which a sample ends; may repeat")
    parser.add_argument("--beams", type=int, help="search for the likeliest text with so many beams; nothing is drawn")
    parser.add_argument("--save", type=Path, metavar="FILE", help="put the text's state away, to go on from later")
    parser.add_argument("--go_on", type=Path, metavar="FILE", help="go on from what --save put away")
    parser.add_argument("--step", type=step, help="a checkpoint's step, or best (default: the latest)")
    parser.add_argument("--trust", action="append", help="a package that the run's config may import")
    options = parser.parse_args(arguments)
    drawing = {name: getattr(options, name) for name in DRAWING if getattr(options, name) is not None}
    if options.beams is not None and drawing:
        raise UserError(f"--beams searches and draws nothing: leave out --{next(iter(drawing))}, or --beams")
    samples, seed = drawing.pop("samples", 1), drawing.pop("seed", 0)
    if options.tokens < 1 or samples < 1:
        raise UserError("--tokens and --samples are at least 1")
    texts = [*(options.prompt or []), *(options.prompt_file or [])]
    if (options.save or options.go_on) and (len(texts) > 1 or samples > 1 or options.beams):
        raise UserError("--save and --go_on are for one text: leave out --beams, --samples and further prompts")
    if "" in options.stop:
        raise UserError("a --stop is empty: give the text before which a sample ends")

    from block_recurrent.data.sources import read_utf8
    from block_recurrent.inference.beams import BeamSearch
    from block_recurrent.inference.generation import Sampling
    from block_recurrent.inference.run import open_run
    from block_recurrent.inference.stop_strings import ends_in_stop, texts_of

    sampling = Sampling(**{"temperature": 0.8, **drawing})
    run = open_run(options.workdir, options.trust or ()).at(options.step)
    run.need_text()
    texts = [text if isinstance(text, str) else read_utf8(text).decode() for text in texts]
    texts = texts or ([""] if options.go_on else ["\n"])
    texts = [text for text in texts for _ in range(samples)]
    try:
        prompts = [run.vocabulary.encode(text.encode()) for text in texts]
        stops = [stop.encode() for stop in options.stop]
    except UnicodeEncodeError as error:
        raise UserError("a --prompt or --stop is not UTF-8: check the terminal's locale") from error
    writers = [Writer(text, f"[{row + 1}] " if len(texts) > 1 else "") for row, text in enumerate(texts)]
    token_bytes = run.vocabulary.token_bytes
    if options.save or options.go_on:
        stream = run.stream(options.go_on)
        stream.feed(texts[0], last=True)
        drawn = run.generator(sampling)([stream.last], options.tokens, seed, stream.state_before_last())
        written = b""
        for (content,) in texts_of(drawn, token_bytes, stops):
            writers[0].write(content)
            written += content
        if options.save:
            stream.feed(written, last=True)
            stream.save(options.save)
    elif options.beams is None:
        drawn = run.generator(sampling)(prompts, options.tokens, seed)
        for contents in texts_of(drawn, token_bytes, stops):
            for writer, content in zip(writers, contents, strict=True):
                writer.write(content)
    else:
        search = BeamSearch(run.model, run.params, options.beams, banned=run.silent)
        for writer, prompt in zip(writers, prompts, strict=True):
            best, _ = search(prompt, options.tokens, ends_in_stop(token_bytes, stops))[0]
            for contents in texts_of([[token] for token in best], token_bytes, stops):
                writer.write(contents[0])
    for writer in writers:
        writer.end()


class Writer:
    """Streams one sample to the terminal: by character if it is alone, by line with its number if there are several."""

    def __init__(self, prompt: str, label: str):
        self.label, self.line = label, ""
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.show(prompt)

    def write(self, content: bytes) -> None:
        self.show(self.decoder.decode(content))

    def show(self, text: str) -> None:
        if not self.label:
            print(text, end="", flush=True)
            return
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            print(self.label + line, flush=True)

    def end(self) -> None:
        self.show(self.decoder.decode(b"", final=True))
        print(self.label + self.line if self.label else "", flush=True)


if __name__ == "__main__":
    run_command(main)
