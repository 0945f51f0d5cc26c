"""The command `generate`: what it prints, and flags that cannot act together."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from block_recurrent import generate
from block_recurrent.errors import UserError
from block_recurrent.inference.generation import Sampling
from block_recurrent.inference.run import open_run


def test_a_single_text_follows_its_prompt(workdir, capsys):
    generate.main([str(workdir), "--prompt=alpha ", "--tokens=12"])
    printed = capsys.readouterr().out
    assert printed.startswith("alpha ") and len(printed) >= len("alpha ") + 5
    with pytest.raises(UserError, match="prompt is empty"):
        generate.main([str(workdir), "--prompt="])


@pytest.mark.parametrize("way", [[], ["--stop=a"], ["--beams=2"]])
def test_several_texts_are_printed_whole_each_below_its_header(workdir, capsys, way):
    samples = [] if "--beams=2" in way else ["--samples=2"]
    generate.main([str(workdir), "--prompt=al\npha", "--prompt=be", "--tokens=40", *samples, *way])
    printed = re.split(r"^--- (.*) ---\n", capsys.readouterr().out, flags=re.MULTILINE)
    headers, texts = printed[1::2], printed[2::2]
    numbers = ["", ", sample 1 of 2", ", sample 2 of 2"][bool(samples) : 1 + 2 * bool(samples)]
    assert headers == [f"prompt {i} of 2{number}" for i in (1, 2) for number in numbers]
    prompts = [prompt for prompt in ("al\npha", "be") for _ in numbers]
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.startswith(prompt) and text.endswith("\n")


def test_a_samples_text_is_that_of_it_alone(workdir, capsys):
    flags = [str(workdir), "--prompt=alpha", "--tokens=30"]
    generate.main([*flags, "--samples=3"])
    first = capsys.readouterr().out.split("--- sample 2 of 3 ---")[0].removeprefix("--- sample 1 of 3 ---\n")
    generate.main(flags)
    assert capsys.readouterr().out == first


def test_only_the_end_of_a_long_prompt_is_printed(workdir, tmp_path, capsys):
    book = "".join(f"word {i} " for i in range(500))
    (tmp_path / "book.txt").write_text(book)
    generate.main([str(workdir), f"--prompt_file={tmp_path / 'book.txt'}", "--tokens=3"])
    printed = capsys.readouterr()
    assert printed.out.startswith(book[-200:]) and len(printed.out) < 220
    assert printed.err == f"the prompt has {len(book):,} characters; here are the last 200\n"


def test_a_text_is_put_away_and_gone_on_with_in_another_process(workdir, tmp_path, capsys):
    arguments = [str(workdir), "--temperature=0"]
    generate.main([*arguments, "--prompt=alpha be", "--tokens=14"])
    whole = capsys.readouterr().out
    generate.main([*arguments, "--prompt=alpha be", "--tokens=6", f"--save={tmp_path / 'here.npz'}"])
    first = capsys.readouterr().out
    command = [sys.executable, "-m", "block_recurrent.generate", *arguments, "--tokens=8"]
    command += [f"--go_on={tmp_path / 'here.npz'}"]
    second = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert first.removesuffix("\n") + second.stdout == whole
    with pytest.raises(UserError, match="one text"):
        generate.main([*arguments, "--prompt=a", "--prompt=b", "--save=x.npz"])


@pytest.mark.parametrize("way", [["--temperature=0", "--repetition_penalty=2"], ["--beams=2"]])
def test_generate_stops_before_a_text(workdir, capsys, way):
    command = [str(workdir), "--prompt=alpha", "--tokens=8", *way]
    generate.main(command)
    text = capsys.readouterr().out.removeprefix("alpha").removesuffix("\n")
    stop = next(letter for letter in text[2:] if letter.isascii())
    generate.main([*command, "--stop=unheard of", f"--stop={stop}"])
    stopped = capsys.readouterr().out.removeprefix("alpha").removesuffix("\n")
    assert len(stopped) < len(text) and stop not in stopped


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--beams=2", "--temperature=0.8"], "leave out --temperature"),
        (["--beams=2", "--samples=2"], "leave out --samples"),
        (["--temperature=0", "--samples=2"], "draws nothing: leave out --samples"),
        (["--temperature=0", "--top_p=0.5"], "draws nothing: leave out --top_p"),
        (["--go_on=x.npz", "--repetition_penalty=2"], "leave it out"),
        (["--stop="], "--stop is empty"),
        (["--min_p=2"], "--min_p: '2' is not a number"),
        (["--temperature=nan"], "--temperature: 'nan' is not a number"),
        (["--temperature=1e300"], "temperature is 1e\\+300"),
        (["--tokens=0"], "--tokens: '0' is not a whole number"),
        (["--top_k=-1"], "--top_k: '-1' is not a whole number"),
        (["--seed=12345678901234567890"], "--seed: '12345678901234567890' is not a whole number"),
    ],
)
def test_flags_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        generate.main(["runs/any", *wrong])


@pytest.mark.parametrize("flag", ["--samples", "--beams"])
def test_more_texts_than_there_is_memory_for_are_refused(workdir, flag):
    with pytest.raises(UserError, match=r"GiB of memory a device .*: give fewer --samples, --beams or prompts"):
        generate.main([str(workdir), f"{flag}=1000000000", "--tokens=1"])


def test_a_text_without_an_end_takes_no_room_before_it_is_there(workdir):
    run = open_run(workdir)
    drawn = run.generator(Sampling())([[1, 2, 3]], 10**15)
    assert all(len(next(drawn)) == 1 for _ in range(20))
