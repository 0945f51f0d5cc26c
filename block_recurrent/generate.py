"""Generates text from a run, as it is drawn.

python -m block_recurrent.generate runs/quickstart --prompt='def '
python -m block_recurrent.generate runs/quickstart --prompt='import ' --prompt='class ' --samples=2 --top_p=0.9
"""

import codecs
from pathlib import Path

from block_recurrent.commandline import command_parser
from block_recurrent.errors import UserError, run_command


def main(arguments: list[str]) -> None:
    parser = command_parser("generate", __doc__)
    parser.add_argument("workdir", help="the run's folder, or gs://...")
    parser.add_argument("--prompt", action="append", help="text to go on from; several are continued side by side")
    parser.add_argument("--prompt_file", action="append", type=Path, help="a file to go on from")
    parser.add_argument("--tokens", type=int, default=500, help="how many new tokens a sample gets")
    parser.add_argument("--samples", type=int, default=1, help="samples of each prompt")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top_k", type=int)
    parser.add_argument("--top_p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, help="a checkpoint's step (default: the latest)")
    parser.add_argument("--trust", action="append", help="a package that the run's config may import")
    options = parser.parse_args(arguments)
    if options.tokens < 1 or options.samples < 1:
        raise UserError("--tokens and --samples are at least 1")

    from block_recurrent.data.sources import read_utf8
    from block_recurrent.inference.generation import Generator, Sampling
    from block_recurrent.inference.run import open_run

    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    run = open_run(options.workdir, options.trust or ()).at(options.step)
    texts = [*(options.prompt or []), *(read_utf8(file).decode() for file in options.prompt_file or [])] or ["\n"]
    texts = [text for text in texts for _ in range(options.samples)]
    try:
        prompts = [run.vocabulary.encode(text.encode()) for text in texts]
    except UnicodeEncodeError as error:
        raise UserError("a --prompt is not UTF-8: check the terminal's locale") from error
    # Ids without text (padding, specials, what only rounds the vocabulary up) are never drawn.
    silent = [token for token in range(run.model.vocabulary_size) if not is_text(run.vocabulary, token)]
    generator = Generator(run.model, run.params, sampling, silent)
    writers = [Writer(text, f"[{row + 1}] " if len(texts) > 1 else "") for row, text in enumerate(texts)]
    for tokens in generator(prompts, options.tokens, options.seed):
        for writer, token in zip(writers, tokens, strict=True):
            if token >= 0:
                writer.write(run.vocabulary.token_bytes(int(token)))
    for writer in writers:
        writer.end()


def is_text(vocabulary, token: int) -> bool:
    return token < vocabulary.size and bool(vocabulary.token_bytes(token))


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
