"""Files written anew and renamed: a reader sees the old content or the new, and nothing is written through a link."""

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_text(file: str | os.PathLike, text: str) -> None:
    write_bytes(file, text.encode())


def write_bytes(file: str | os.PathLike, content: bytes) -> None:
    """Writes a file as a whole, here or in a bucket, whose objects are whole by themselves."""
    if "://" in str(file):
        from etils import epath  # whoever only prepares data does without it

        epath.Path(file).write_bytes(content)
        return
    with replacing(Path(file)) as stream:
        stream.write(content)


@contextlib.contextmanager
def replacing(place: Path) -> Iterator[BinaryIO]:
    """A new local file that takes the place of what has the name once it is complete; a device is written to."""
    if is_device(place):
        with place.open("wb") as file:
            yield file
        return
    with naming(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".partial", dir=place.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
        with naming(place):
            os.chmod(temporary, 0o666 & ~umask())
            os.replace(temporary, place)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def is_device(place: Path) -> bool:
    """Whether a name stands for something else than a file, such as /dev/stdout, which nothing may replace."""
    if str(place.absolute()).startswith(("/dev/std", "/dev/fd/", "/proc/")):  # what is open may be a file
        return True
    return place.exists() and not place.is_file() and not place.is_dir()


@contextlib.contextmanager
def naming(place: Path) -> Iterator[None]:
    """Errors name the file that was asked for, not the hidden one beside it."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(place), None
        raise


@functools.cache
def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
