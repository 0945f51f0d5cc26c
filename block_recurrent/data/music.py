"""Polyphonic music as piano rolls (Boulanger-Lewandowski et al. 2012): a document is a song, a position a frame of it.

Files are MATLAB's, `traindata`, `validdata` and `testdata` with a matrix [frames 88] of 0 and 1 for each song, or
NumPy's, with the frames of all songs packed: `train_packed` [frames 11] and `train_lengths`, and so on. They may come
from strangers: neither form is read in a way that could run code, and nothing but these arrays is taken.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from block_recurrent.data.documents import SPLITS, Document, Dropped, Unit
from block_recurrent.data.files import is_file, join, read_bytes, stamp_of
from block_recurrent.data.running_text import short
from block_recurrent.data.signals import NoteVocabulary
from block_recurrent.errors import UserError

SONGS = {  # of each collection, in train, validation and test
    "Nottingham": (694, 173, 170),
    "JSB_Chorales": (229, 76, 77),
    "MuseData": (524, 135, 124),
    "Piano_midi": (87, 12, 25),
}


@dataclass(frozen=True)
class Music:
    """One of the four collections, with its own splits."""

    input: str  # COLLECTION.mat or COLLECTION.npz, or the folder that one of them is in
    collection: str
    contiguous: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.collection.lower()

    @property
    def published(self) -> dict[str, dict[str, int]]:
        return {"documents": dict(zip(SPLITS, SONGS[self.collection], strict=True))}

    def units(self) -> list[Unit]:
        names = [f"{self.collection}{ending}" for ending in (".mat", ".npz")]
        places = (self.input, *(join(self.input, name) for name in names))
        place = next((place for place in places if is_file(place)), None)
        if place is None:
            raise UserError(f"{self.input} is no file and has no {', no '.join(names)}: fetch it (--list says where)")
        return [Unit((place,), stamp_of(place), split) for split in SPLITS]

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        (place,) = unit.places
        songs = packed_songs if place.endswith(".npz") else matlab_songs
        for number, frames in enumerate(songs(place, short(unit.split))):
            yield Document(f"{unit.split}/{number}", frames.tobytes(), split=unit.split)


def matlab_songs(place: str, split: str) -> Iterator[np.ndarray]:
    """The songs of a .mat file, packed, each [frames 11]."""
    try:
        import scipy.io
    except ImportError as error:
        raise UserError(f"{place} is read with scipy, which is not installed: pip install scipy") from error
    name = f"{split}data"
    content = io.BytesIO(read_bytes(place))
    try:
        songs = scipy.io.loadmat(content, variable_names=[name]).get(name)
    except Exception as error:  # whatever a parser raises over a stranger's bytes
        raise UserError(f"{place} cannot be read as a MATLAB file ({error}): fetch it again") from error
    if songs is None:
        raise UserError(f"{place} has no {name}: it is no file of piano rolls")
    if not isinstance(songs, np.ndarray) or songs.dtype != object or songs.ndim != 2 or len(songs) != 1:
        raise UserError(f"{place}: {name} is no row of matrices, one for each song")
    for number, roll in enumerate(songs[0]):
        if not isinstance(roll, np.ndarray) or roll.dtype.kind not in "biuf":
            raise UserError(f"{place}: song {number} of {name} is no matrix of numbers")
        if roll.ndim != 2 or roll.shape[1] != NoteVocabulary.size:
            raise UserError(f"{place}: song {number} of {name} has the shape {roll.shape}, not (frames, 88)")
        if not np.all((roll == 0) | (roll == 1)):
            raise UserError(f"{place}: song {number} of {name} has numbers other than 0 and 1")
        yield np.packbits(roll != 0, axis=1)


def packed_songs(place: str, split: str) -> Iterator[np.ndarray]:
    """The songs of a .npz file, each [frames 11]."""
    names = (f"{split}_packed", f"{split}_lengths")
    try:
        with np.load(io.BytesIO(read_bytes(place)), allow_pickle=False) as arrays:
            packed, lengths = (arrays[name] for name in names)
    except KeyError as error:
        raise UserError(f"{place} has no {' or no '.join(names)}: it is no file of piano rolls") from error
    except Exception as error:
        raise UserError(f"{place} cannot be read as a NumPy file ({error}): fetch it again") from error
    if packed.dtype != np.uint8 or packed.ndim != 2 or packed.shape[1] != NoteVocabulary.record:
        raise UserError(f"{place}: {names[0]} is {packed.dtype} {packed.shape}, not uint8 (frames, 11)")
    if lengths.dtype.kind not in "iu" or lengths.ndim != 1 or np.any(lengths < 0) or lengths.sum() != len(packed):
        raise UserError(f"{place}: {names[1]} are not the lengths of {len(packed)} frames")
    yield from np.split(packed, np.cumsum(lengths))[:-1]
