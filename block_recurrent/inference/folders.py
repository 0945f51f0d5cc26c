"""Folders that are not runs, and what they are."""

from etils import epath

from block_recurrent.config import CONFIG
from block_recurrent.data.store import MANIFEST


def what_it_is(folder: epath.Path) -> str:
    """What somebody has given who meant a run."""
    if not folder.exists():
        return "there is nothing of that name"
    if not folder.is_dir():
        return "it is a file; give the --workdir of a training run"
    for parent in (folder.parent, folder.parent.parent):
        if (parent / CONFIG).is_file():
            return f"it is inside one, {parent}"
    inside = {file.name for file in folder.iterdir()}
    if MANIFEST in inside:
        return "it is a prepared store, which runs are trained on"
    if "comparison.json" in inside:
        runs = sorted(name for name in inside if (folder / name / CONFIG).is_file())
        return f"it is a comparison of runs; give one of them: {', '.join(runs)}"
    if {"_METADATA", "_CHECKPOINT_METADATA"} & inside:
        return f"it is an Orbax checkpoint without its run, which has a {CONFIG} beside its checkpoints"
    if any(name.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt")) for name in inside):
        return "it looks like a model of PyTorch; block_recurrent.convert reads those of the papers' authors"
    return f"it has no {CONFIG}; give the --workdir of a training run"
