"""Every config under configs/ builds, and is the same model with remat and depth scan on and off."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from benchmarks import plan_paper
from block_recurrent import config, slices
from block_recurrent.data.registry import TASKS
from block_recurrent.errors import UserError
from block_recurrent.training.loop import train

ROOT = Path(__file__).parents[1]
EXPERIMENTS = [
    str(file.relative_to(ROOT)) for file in sorted((ROOT / "configs").rglob("*.gin")) if "base" not in file.parts
]

# The models of configs/pg19 on another corpus: what builds those builds these.
OTHER_CORPORA = ("configs/arxiv", "configs/github", "configs/pg19_bytes")
MODELS = [file for file in EXPERIMENTS if not file.startswith(OTHER_CORPORA)]


def is_shape(leaf):
    return isinstance(leaf, tuple) and all(isinstance(size, int) for size in leaf)


def build(file, *bindings):
    config.parse([file], bindings)
    config.fill_vocabulary(lambda store: 259)
    return config.bindings_of(train)


def shapes(model):
    """Names and shapes of the parameters, layer by layer whether they are stacked or not."""
    start, blank = jnp.zeros((1, model.block), bool), jax.eval_shape(lambda: model.blank(1, model.block))
    variables = jax.eval_shape(model.init, jax.random.key(0), blank, model.initial_state(1), start)
    found = []
    params = nn.unbox(variables)["params"]
    for i, run in enumerate(model.stack.depths):
        layer = params["stack"].get(f"layers_{i}", {})
        stacked = 1 if run > 1 else 0
        found += [jax.tree.map(lambda leaf, stacked=stacked: leaf.shape[stacked:], layer)] * run
    return found, jax.tree.map(lambda leaf: leaf.shape, {**params, "stack": None})


@pytest.mark.parametrize("file", MODELS)
def test_same_parameters_with_remat_and_depth_scan_on_and_off(file):
    plain, other = build(file, "REMAT=False")["model"], build(file, "REMAT=True", "SCAN_DEPTH=False")["model"]
    assert shapes(other) == shapes(plain)
    assert other.stack.remat and not plain.stack.remat and set(other.stack.depths) == {1}


@pytest.mark.parametrize("file", MODELS)
def test_a_config_reaches_the_layers(file):
    """A binding is seen by the layer that is built: gin does not lose it on the way."""
    if file.startswith(("configs/pg19", "configs/quickstart")):
        built = build(file, "WINDOW=16", "DROPOUT=0.25")["model"]
        assert built.block == 16 and all(layer.dropout == 0.25 and layer.window == 16 for layer in built.stack.layers)
    else:
        build(file)
        backend = ["BACKEND='scan'"] if "BACKEND" in config.defined_names() else []
        built = build(file, "DROPOUT=0.25", *backend)["model"]
        assert any(getattr(layer, "dropout", None) == 0.25 for layer in built.stack.layers)
        assert all(getattr(layer, "backend", "scan") == "scan" for layer in built.stack.layers)


@pytest.mark.parametrize("file", [file for file in EXPERIMENTS if file not in MODELS])
def test_another_corpus_has_the_same_model(file):
    """But for the size of a vocabulary; what section 4 says of its training differs."""
    _, corpus, name = Path(file).parts
    here, there = build(file), build(f"configs/pg19/{name}")
    assert here["model"].stack == there["model"].stack and here["segment"] == there["segment"]
    assert here["store"] != there["store"]
    tokens = here["rows"] * here["segment"] / (there["rows"] * there["segment"])
    assert (tokens, here["steps"]) == ((8, 250_000) if corpus == "github" else (1, 500_000))


@pytest.mark.parametrize("file", EXPERIMENTS)
def test_a_config_names_a_store_that_prepare_makes(file):
    folder, _, task = build(file)["store"].partition("/")
    assert folder == "data" and task in TASKS


@pytest.mark.parametrize("file", EXPERIMENTS)
def test_a_config_opens_with_its_command_and_what_to_expect(file):
    header = (ROOT / file).read_text().split("from __gin__")[0]
    assert f"python -m block_recurrent.train --gin_file={file}" in header
    assert re.search(r"Expect ((a (test )?perplexity of )?\d|.*which gives no figure)", header)


def test_every_command_names_its_own_file_and_a_workdir_of_its_own():
    workdirs = {}
    for file in EXPERIMENTS:
        header = (ROOT / file).read_text().split("from __gin__")[0]
        ((named, workdir),) = re.findall(r"block_recurrent.train --gin_file=(\S+) --workdir=(\S+)", header)
        assert named == file
        assert "block_recurrent.compare" in header or set(re.findall(r"evaluate (\S+)", header)) <= {workdir}
        workdirs.setdefault(workdir, []).append(file)
    assert [files for files in workdirs.values() if len(files) > 1] == []


def test_commands_say_which_licences_and_which_vocabulary():
    files = [*(ROOT / "configs").rglob("*.gin"), ROOT / "README.md", ROOT / "launch" / "README.md"]
    text = re.sub(r"\\\n#? *", "", "\n".join(file.read_text() for file in files))
    for task, option in (
        ("github", "--licences="),
        ("pg19_tokens", "--vocabulary=gs://t5-data/vocabs/cc_all.32000/sentencepiece.model"),
    ):
        commands = re.findall(rf".*prepare .*--task={task}.*", text)
        assert commands and [command for command in commands if option not in command] == []


@pytest.mark.parametrize("name", ["rec_fixed_skip_large", "rec_lstm_single_large", "slide_13l_large"])
def test_large_models_take_four_times_the_rows(name):
    """The paper's 32 replicas x 4, each with one segment of 4096."""
    built = build(f"configs/pg19/{name}.gin")
    assert (built["rows"], built["segment"], built["steps"]) == (128, 4096, 200_000)


@pytest.mark.parametrize("name", plan_paper.CONFIGS)
def test_rows_divide_over_the_slices_that_are_planned(name):
    rows = build(f"configs/pg19/{name}.gin")["rows"]
    assert all(rows % slices.find(where).devices == 0 for where in plan_paper.CONFIGS[name])


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("slide_12l", 151),
        ("slide_13l", 164),
        ("xl_2048", 151),
        ("memorizing", 151),
        ("slide_13l_large", 327),
        ("rec_lstm_single_large", 375),
        ("rec_fixed_skip_large", 320),
    ],
)
def test_parameter_counts_are_the_papers(name, millions):
    """The paper's figures (4.1, Table 2) leave the embedding out; with the norms and scales they agree to 0.3 %."""
    layers, _ = shapes(build(f"configs/pg19/{name}.gin")["model"])
    count = sum(math.prod(shape) for shape in jax.tree.leaves(layers, is_leaf=lambda leaf: isinstance(leaf, tuple)))
    assert abs(count / 1e6 - millions) < 0.003 * millions


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("enwik8/srupp_base", 108),
        ("enwik8/srupp_base_k5", 98),
        ("enwik8/srupp_large", 191),
        ("enwik8/srupp_large_d8", 195),
        ("wikitext103/srupp_base", 148),
        ("wikitext103/srupp_large", 232),
        ("wikitext103/srupp_large_d8", 234),
        ("lm1b/srupp_base", 328),
        ("lm1b/srupp_large", 465),
        ("ptb/qrnn", 18),
        ("ptb/lrn", 11),
    ],
)
def test_parameter_counts_of_the_recurrences_are_the_papers(name, millions):
    """All parameters, embeddings and head included, as these papers round them."""
    count = sum(
        math.prod(shape) for shape in jax.tree.leaves(shapes(build(f"configs/{name}.gin")["model"]), is_leaf=is_shape)
    )
    assert abs(count / 1e6 - millions) < max(0.5, 0.005 * millions)


def test_layers_of_all_kinds_mix_by_gin_alone(tmp_path):
    file = tmp_path / "mixed.gin"
    bases = ("quickstart", "base/memorizing", "base/recurrences")
    file.write_text("".join(f"include 'configs/{base}.gin'\n" for base in bases))
    spec = "PATTERN='slide sru rec qrnn lrn atr srupp srupp_plain mem'"
    model = build(str(file), spec, "PROJECTION=32", "CONTEXT=16")["model"]
    names = [type(layer).__name__.removesuffix("Layer") for layer in model.stack.layers]
    assert names == ["SlidingWindow", "SRU", "BlockRecurrent", "QRNN", "LRN", "ATR", "SRUpp", "SRUpp", "Memorizing"]
    assert model.block == 64 and len(shapes(model)[0]) == 9


def test_a_missing_argument_is_named(tmp_path):
    file = tmp_path / "incomplete.gin"
    file.write_text((ROOT / "tests" / "tiny.gin").read_text().replace("    rows = 4\n", ""))
    config.parse([str(file)], [])
    with pytest.raises(UserError, match=r"the config gives no value for train.rows"):
        config.configured(train, workdir="x")


def test_feedback_gives_every_layer_queries_for_the_states():
    layers, _ = shapes(build("configs/pg19/feedback_fixed_skip.gin")["model"])
    assert len(layers) == 12 and all(layer["cross_queries"] == (1024, 1024) for layer in layers)


def test_the_papers_text_reaches_the_layers(tmp_path):
    file = tmp_path / "paper_text.gin"
    file.write_text("include 'configs/pg19/rec_lstm_dual.gin'\ninclude 'configs/base/paper_text.gin'\n")
    layers = build(str(file))["model"].stack.layers
    assert all(layer.sees_itself and layer.mask_empty for layer in layers)
    assert layers[1].z_bias and layers[1].z_tanh == "lstm"


@pytest.mark.parametrize("name", ["enwik8/srupp_base", "enwik8/srupp_base_k5", "wikitext103/srupp_base"])
def test_srupp_drops_where_the_authors_code_drops(name):
    """Single numbers of embedding and output, and nothing in the cell of the last layer."""
    model = build(f"configs/{name}.gin", "DROPOUT=0.25")["model"]
    layers, depths = model.stack.layers, model.stack.depths
    rates = [layer.rate_in_cell for layer, depth in zip(layers, depths, strict=True) for _ in range(depth)]
    assert rates == [0.25] * 9 + [0.0] and model.single_dropout


# As the authors' scripts have them: the layers' settings, the optimizer's first rate and clipping, rows, and the tokens
# or images of an epoch, of which a segment of every row is a step.
WORDS, CHARACTERS, FRAMES, PIXELS = 929_589, 5_269_890, 175_867, 55_000 * 784
R_TRANSFORMERS = ("dim", "heads", "window", "cell", "local_layers", "dropout")
TCNS = ("kernel_size", "dropout")
SCRIPTS = {
    "mnist/r_transformer": (R_TRANSFORMERS, (32, 2, 7, "gru", 2, 0.05), 8, 1e-3, None, 32, PIXELS),
    "music/r_transformer": (R_TRANSFORMERS, (160, 4, 6, "gru", 1, 0.1), 3, 256 * 5e-5, None, 1, FRAMES),
    "ptb_chars/r_transformer": (R_TRANSFORMERS, (512, 8, 7, "gru", 1, 0.15), 3, 2.0, 0.15, 16, CHARACTERS),
    "ptb/r_transformer": (R_TRANSFORMERS, (128, 8, 9, "lstm", 1, 0.35), 3, 2.0, 0.35, 16, WORDS),
    "mnist/tcn": (("width", *TCNS), (25, 7, 0.05), 8, 2e-3, None, 64, PIXELS),
    "music/tcn": (("width", *TCNS), (150, 5, 0.25), 4, 1e-3, None, 1, FRAMES),
    "ptb_chars/tcn": (TCNS, (3, 0.1), 3, 4.0, 0.15, 32, CHARACTERS),
    "ptb/tcn": (("width", *TCNS), (600, 3, 0.45), 4, 4.0, 0.35, 16, WORDS),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_settings_are_those_of_the_authors_scripts(name):
    fields, values, depth, rate, clip, rows, tokens = SCRIPTS[name]
    built = build(f"configs/{name}.gin")
    stack = built["model"].stack
    assert sum(stack.depths) == depth
    for layer in stack.layers:
        assert tuple(getattr(layer, field) for field in fields) == values
    assert float(built["optimizer"].learning_rate(0)) == pytest.approx(rate) and built["optimizer"].clip == clip
    assert built["rows"] == rows and built["evaluate_every"] == math.ceil(tokens / (rows * built["segment"]))


def test_tcn_of_characters_ends_as_wide_as_its_vectors():
    model = build("configs/ptb_chars/tcn.gin")["model"]
    assert [(layer.dim, layer.width) for layer in model.stack.layers] == [(100, 450), (450, 450), (450, 100)]
    assert [layer.dilation for layer in model.stack.layers] == [1, 2, 4]


# sqrt(3 / d) of each model, in the authors' scripts.
SRUPP = {
    "enwik8/srupp_base": 0.03125,
    "enwik8/srupp_base_k5": 0.03125,
    "enwik8/srupp_large": 0.02706,
    "enwik8/srupp_large_d8": 0.02233,
    "wikitext103/srupp_base": 0.03125,
    "wikitext103/srupp_large": 0.02706,
    "wikitext103/srupp_large_d8": 0.02245,
    "lm1b/srupp_base": 0.02706,
    "lm1b/srupp_large": 0.01985,
}


def limit_of(init):
    return float(jnp.abs(init(jax.random.key(0), (256, 64))).max())


@pytest.mark.parametrize("name", SRUPP)
def test_srupp_vectors_begin_as_wide_as_the_model_has_it(name):
    model = build(f"configs/{name}.gin")["model"]
    assert limit_of(model.embedding_init) == pytest.approx(SRUPP[name], rel=1e-3)
    if not name.startswith("enwik8"):  # the first softmax holds an entry for each of the other clusters: a round size
        assert model.head.cutoffs[0] + len(model.head.cutoffs) in (20_000, 60_000)
        assert {layer.attention_dropout > 0 for layer in model.stack.layers} == {name.startswith("wikitext103")}


def test_srupp_vectors_follow_another_width():
    words, text = (build(f"configs/{name}/srupp_base.gin", "DIM=768")["model"] for name in ("wikitext103", "enwik8"))
    for init in (words.embedding_init, text.embedding_init, text.head.kernel_init):
        assert limit_of(init) == pytest.approx(0.0625, rel=1e-3)


def test_a_limit_saved_by_an_earlier_version_still_builds():
    saved = "parameters.uniform.limit = %LIMIT\nlanguage_model.LanguageModel.embedding_init = @parameters.uniform()\n"
    imports = "".join(f"from block_recurrent.layers import {name}\n" for name in ("language_model", "parameters"))
    config.parse(
        ["configs/enwik8/srupp_base.gin"],
        [],
        f"from __gin__ import dynamic_registration\n{imports}LIMIT = 0.05\n{saved}",
    )
    assert limit_of(config.bindings_of(train)["model"].embedding_init) == pytest.approx(0.05, rel=1e-3)


def test_qrnn_of_penn_treebank_takes_the_papers_steps():
    """Of gradients that are summed over the 105 tokens of a row; and what goes to the softmax is dropped once."""
    built = build("configs/ptb/qrnn.gin")
    optimizer, tokens = built["optimizer"], built["segment"]
    assert tokens == 105 and optimizer.clip * tokens == pytest.approx(10.0)
    weights, summed = np.array([0.5, -2.0], np.float32), np.array([3.0, 4.0], np.float32)
    found, _ = optimizer.transformation.update(summed / tokens, optimizer.transformation.init(weights), weights)
    np.testing.assert_allclose(found, -1.0 * (summed + 2e-4 * weights), rtol=1e-6)
    assert built["model"].dropout == 0.0 and {layer.dropout for layer in built["model"].stack.layers} == {0.5}
