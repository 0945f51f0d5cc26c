"""The authors' own code as a contender, from a checkout on PYTHONPATH: its gin files, its Trainer, its training step.

It needs Python 3.12 with clu, etils, flax, gin-config, jax, numpy, optax, orbax-checkpoint, scipy, seqio, tensorflow,
tensorflow-datasets and tensorflow-text, at the versions of requirements.txt. Nothing of the checkout is changed.
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

import gin
import jax
import numpy as np
from absl import flags
from serving import serve

SIZES = {
    "small": {"EMBED_DIM": 256, "NUM_HEADS": 4, "WINDOW_LENGTH": 128, "SEGMENT_LENGTH": 1024, "NUM_EMBEDDINGS": 256},
    "base": {"EMBED_DIM": 512, "NUM_HEADS": 8, "WINDOW_LENGTH": 256, "SEGMENT_LENGTH": 2048, "NUM_EMBEDDINGS": 32000},
}
ROWS = {"small": 2, "base": 1}
DEPTH = {"small": {"slide": 4, "rec": 4}, "base": {"slide": 13, "rec": 12}}
RECURRENT = {"small": 2, "base": 9}  # counted from zero


def bindings_of(size: str, model: str) -> list[str]:
    s = SIZES[size]
    values = {**s, "NUM_LAYERS": DEPTH[size][model], "HEAD_DIM": 64, "MLP_DIM": 4 * s["EMBED_DIM"]}
    values |= {"DROPOUT_RATE": 0.0, "ATTN_DROPOUT_RATE": 0.0, "DTYPE": '"float32"'}
    values |= {"TransformerTaskConfig.batch_size": ROWS[size]}
    if model == "rec":
        values["decoder_stack.DecoderStack.recurrent_layer_indices"] = (RECURRENT[size],)
        values["transformer_layer.TransformerLayer.recurrent_num_states"] = s["WINDOW_LENGTH"]
    return [f"{name} = {value}" for name, value in values.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["step"])
    parser.add_argument("--size", default="small")
    parser.add_argument("--model", default="rec")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    if importlib.util.find_spec("training_loop") is None:
        sys.exit("no training_loop.py on PYTHONPATH: --meliad takes the folder of a checkout of meliad")
    import training_loop

    flags.FLAGS(sys.argv[:1])
    checkout = Path(training_loop.__file__).parent
    gin.add_config_file_search_path(str(checkout / "transformer" / "configs"))
    files = ["base_memory.gin", "options/lr_rsqrt_decay_std.gin"]
    files += ["recurrent/bias_skip.gin"] if options.model == "rec" else []
    gin.parse_config_files_and_bindings(files, bindings_of(options.size, options.model))

    rows, size = ROWS[options.size], SIZES[options.size]
    trainer = training_loop.Trainer(
        get_dataset_iterator_function=lambda *_: None,
        workdir=tempfile.mkdtemp(),
        batch_size=rows,
        save_checkpoints=False,
    )
    info = trainer.create_model_info()
    state = info.initialize_model()
    step = info.train_step_fn(trainer.learning_rate_schedule_fn)
    tokens = np.random.default_rng(0).integers(1, size["NUM_EMBEDDINGS"], (rows, size["SEGMENT_LENGTH"]), np.int32)
    batch = {"targets": tokens, "start_of_sequence": np.zeros(rows, bool), "epoch": np.zeros(rows, np.int32)}

    def run() -> None:
        nonlocal state
        state, metrics = step(state, info.copy_input_to_devices(batch))
        jax.block_until_ready((state, metrics))

    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    serve(run, tokens.size, parameters)


if __name__ == "__main__":
    main()
