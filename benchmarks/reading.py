"""How fast rows are read from a warm store, by one core; and how long a loop waits for batches on the device.

python -m benchmarks.reading
python -m benchmarks.reading --store=data/pg19_tokens
"""

import argparse
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from block_recurrent.data.rows import RowStream
from block_recurrent.data.store import Store, open_store
from block_recurrent.prepare import prepare
from block_recurrent.ranges import POSITIVE

SHAPES = ((32, 4096), (256, 512), (8, 512), (16, 128))  # rows, segment: Table 1's two, a small one, words
BLOCK = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="a prepared store (default: 64 MB of made-up text, made for the purpose)")
    parser.add_argument("--seconds", type=POSITIVE, default=3.0, help="for each shape")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(options.store) if options.store else made_up(Path(folder))
        split = store.split("train")
        warm_up(split)
        print(f"{store.folder}: {store.manifest['splits']['train']['tokens']:,} tokens")
        for rows, segment in SHAPES:
            speed = rate(RowStream(split, rows, segment, BLOCK), options.seconds)
            print(f"{rows:4} rows of {segment:5}: {speed / 1e6:8.1f} million tokens a second and core")
        for ahead in (False, True):
            waited, stepped = waiting(RowStream(split, *SHAPES[0], BLOCK), options.seconds, ahead)
            how = "read ahead" if ahead else "read between steps"
            print(f"{how}: a loop with steps of 20 ms waits {waited / (waited + stepped):.1%} of its time")


def warm_up(split) -> None:
    """Reads everything once."""
    for part, _ in split.parts:
        for at in range(0, len(part.tokens), 1 << 24):
            np.sum(part.tokens[at : at + (1 << 24)])


def made_up(folder: Path) -> Store:
    """Documents of 2 kB to 2 MB, their lengths spread as those of books and papers are."""
    rng = np.random.default_rng(0)
    (folder / "texts").mkdir()
    for i, size in enumerate(np.exp(rng.uniform(np.log(2e3), np.log(2e6), 220)).astype(int)):
        (folder / "texts" / f"{i:03d}.txt").write_bytes(rng.integers(32, 127, size, np.uint8).tobytes())
    return prepare("text_files", folder / "store", input=str(folder / "texts"))[0]


def rate(stream: RowStream, seconds: float) -> float:
    """Tokens a second, by the processor time of this process: what one core delivers."""
    _, cursor = stream.read(stream.begin())
    tokens, began = 0, time.process_time()
    while time.process_time() - began < seconds:
        batch, cursor = stream.read(cursor)
        tokens += int(np.count_nonzero(batch["weights"]))
    return tokens / (time.process_time() - began)


def waiting(stream: RowStream, seconds: float, ahead: bool, step: float = 0.02) -> tuple[float, float]:
    """Seconds that a loop waits for batches, and that it sleeps, as a host does while a device takes a step."""

    def one_by_one(cursor):
        while True:
            batch, cursor = stream.read(cursor)
            yield jax.device_put(batch), cursor

    batches = stream.ahead(stream.begin(), jax.device_put) if ahead else one_by_one(stream.begin())
    waited = stepped = 0.0
    next(batches)
    while waited + stepped < seconds:
        began = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - began
        time.sleep(step)
        stepped += step
    batches.close()
    return waited, stepped


if __name__ == "__main__":
    main()
