"""A store that mixes others: a seqio Mixture of their Tasks, written down for the row stream to read."""

import hashlib
import json
import os
import re

from block_recurrent.data import files, tasks
from block_recurrent.data.documents import SPLITS
from block_recurrent.data.store import FORMAT, MANIFEST, Store, contents, form, is_store, open_store, store_in
from block_recurrent.errors import UserError


def parse(text: str) -> dict[str, float]:
    """ "data/a=0.7,data/b=0.3" as a dictionary; rates are shares of the tokens, and need not add up to 1."""
    rates = {}
    for part in text.split(","):
        place, _, rate = part.strip().rpartition("=")
        place = os.path.expanduser(place)
        if any(files.absolute(place) == files.absolute(other) for other in rates):
            raise UserError(f"--mixture={text}: {place} is there twice")
        try:
            rates[place] = float(rate)
        except ValueError:
            place = ""
        if not place or not 0 < rates[place] < float("inf"):
            raise UserError(f"--mixture={text}: give STORE=RATE,STORE=RATE with rates above 0")
    return rates


def mix(text: str, output: str | None, overwrite: bool = False) -> Store:
    """Makes a store of the stores and rates in `text`."""
    rates = parse(text)
    if output is None:
        raise UserError("--mixture needs --output, the folder to make")
    if is_store(output) and "mixture" not in store_in(output).manifest:
        raise UserError(f"{output} is a store of its own, perhaps one to be mixed: choose another --output")
    if files.is_file(output) or (files.is_folder(output) and not (overwrite and is_store(output))):
        raise UserError(f"{output} exists already: choose another --output")
    stores = {place: open_store(place) for place in rates}
    for place, store in stores.items():
        if "mixture" in store.manifest:
            raise UserError(f"{place} is a mixture itself: mix the stores that it is made of")
        if store.manifest["vocabulary"] != next(iter(stores.values())).manifest["vocabulary"]:
            raise UserError(f"{place} and {next(iter(stores))} have different vocabularies: prepare them with one")
        if form(store.manifest) != form(next(iter(stores.values())).manifest):
            raise UserError(f"{place} and {next(iter(stores))} do not have the same labels: mix stores that do")
    # seqio allows few characters in a name.
    names = {f"{re.sub('[^A-Za-z0-9]', '_', os.path.basename(place))}_{i}": place for i, place in enumerate(stores)}
    mixed = {name: (stores[place], rates[place]) for name, place in names.items()}
    if not any(map(tasks.refusal, stores.values())):
        mixture = tasks.register_mixture("block_recurrent_mixture", mixed)
        rates = {place: mixture.get_rate(tasks.seqio.get_mixture_or_task(name)) for name, place in names.items()}
    labels, record = form(next(iter(stores.values())).manifest)
    manifest = {
        "format": FORMAT,
        "task": "mixture of " + ", ".join(store.manifest["task"] for store in stores.values()),
        "vocabulary": next(iter(stores.values())).manifest["vocabulary"],
        "mixture": [
            {
                "store": relative(stores[place].folder, output),
                "rate": float(rate),
                "splits": contents(stores[place]),
            }
            for place, rate in rates.items()
        ],
        **({"labels": labels} if labels else {}),
        **({"record": record} if record else {}),
        "splits": {split: total([(stores[place], rates[place]) for place in stores], split) for split in SPLITS},
    }
    vocabulary = next(iter(stores.values())).vocabulary
    vocabulary.save(output)
    files.write_bytes(files.join(output, MANIFEST), json.dumps(manifest, indent=2).encode())
    return store_in(output)


def relative(place: str, output: str) -> str:
    """A store's place as its mixture notes it, so that both can be moved together."""
    return place if files.is_remote(place) or files.is_remote(output) else os.path.relpath(place, output)


def total(rates: list[tuple[Store, float]], split: str) -> dict:
    """The sums of a split's counts, and a hash that changes with any store and any rate."""
    entries = [store.manifest["splits"][split] for store, _ in rates]
    counts = ("documents", "tokens", "predictions", "bytes", "words", "unknown")
    parts = "\n".join(f"{rate} {entry['sha256']}" for entry, (_, rate) in zip(entries, rates, strict=True))
    sums = {key: sum(entry[key] for entry in entries) for key in counts}
    if "labels" in entries[0]:
        sums["labels"] = [sum(counts) for counts in zip(*(entry["labels"] for entry in entries), strict=True)]
    return {**sums, "sha256": hashlib.sha256(parts.encode()).hexdigest()}
