"""--gin.NAME=VALUE as it is typed: text without quotes, what has to be imported, and advice that works."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath

import block_recurrent
from block_recurrent import compare, config, train
from block_recurrent.data.store import Store
from block_recurrent.errors import MISTAKE, Preempted, UserError, run_command
from block_recurrent.plan import configured_training
from block_recurrent.training import loop
from block_recurrent.training.loop import check_vocabulary

ROOT = Path(__file__).parents[1]
QUICKSTART = "configs/quickstart.gin"
SRU = "configs/side_by_side/sru.gin"
TINY = "tests/tiny.gin"


def built(file, *bindings, size=259):
    config.parse([file], bindings)
    config.fill_vocabulary(lambda store: size)
    return config.bindings_of(loop.train)


def refusal(file, *bindings):
    with pytest.raises(UserError) as error:
        built(file, *bindings)
    message = str(error.value).splitlines()[0]
    assert message == str(error.value) or "In call to configurable" in str(error.value)
    return message


def advised(message):
    """The bindings and the gin files that a message says to give, as a shell reads them."""
    words = re.findall(r"--(gin\S*=(?:'[^']*'|\"[^\"]*\"|[^\s,;:]+))", message)
    given = [shlex.split(word)[0] for word in words]
    bindings = [word.removeprefix("gin.") for word in given if word.startswith("gin.")]
    return bindings, [word.removeprefix("gin_file=") for word in given if word.startswith("gin_file=")]


@pytest.mark.parametrize(
    "text",
    ["data/mine", "mine", "/data/my text/a#b", "gs://bucket/store", "2024", "None", "../up", "1e3", "data/it's", "-x"],
)
def test_text_needs_no_quotes_where_text_is_expected(text):
    assert built(QUICKSTART, f"STORE={text}")["store"] == text
    assert built(QUICKSTART, f"train.store={text}")["store"] == text
    assert built(QUICKSTART, f"STORE={text!r}")["store"] == text


def test_patterns_types_and_gates_need_no_quotes():
    model = built(QUICKSTART, "PATTERN=2*slide rec", "GATE=lstm", "DTYPE=bfloat16", "REMAT=products")["model"]
    assert model.stack.depths == (2, 1) and model.stack.layers[1].gate == "lstm"
    assert model.dtype == "bfloat16" and model.stack.remat == "products"


def test_what_gin_reads_as_a_value_stays_one():
    assert built(QUICKSTART, "REMAT=True")["model"].stack.remat is True
    assert built(SRU, "BACKEND='scan'", "BACKEND=None")["model"].stack.layers[0].backend is None
    assert built(TINY, "STORE=%PATTERN")["store"] == "2*slide"


@pytest.mark.parametrize(
    ("binding", "form"),
    [
        ("LEARNING_RATE=fast", "give a number: --gin.LEARNING_RATE=0.006"),
        ("STEPS=10.5.3", "give a number: --gin.STEPS=1000"),
        ("train.seed=a", "give a number: --gin.train.seed=1"),
        ("train.health=yes", "give True or False: --gin.train.health=True"),
        ("train.optimizer=adam", "give a reference, which begins with @: --gin.train.optimizer='@optimizers.adam()'"),
        ("train.keep_every=x/y", "give a number: --gin.train.keep_every=1"),
    ],
)
def test_what_is_no_value_is_told_with_the_form_expected(binding, form):
    message = refusal(QUICKSTART, binding)
    assert message.endswith(form)
    assert built(QUICKSTART, *advised(message.partition("; give")[2])[0])


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("STORE='data/mine", "the quotes do not match"),
        ("STORE=", "has no value: write --gin.NAME=VALUE"),
        ("STORE=@mine", "No configurable matching reference '@mine'"),
        ("STORE=%MINE", "the config gives no value for MINE: give --gin.MINE=VALUE"),
    ],
)
def test_quotes_references_and_macros_that_are_wrong_are_no_text(binding, message):
    assert message in refusal(QUICKSTART, binding)


@pytest.mark.parametrize("name", ["adafactor", "adam", "radam", "sgd"])
def test_an_optimizer_brings_its_file(name):
    """Its rates are those of configs/base, but for what is given on the command line."""
    notes = config.parse([SRU], [f"train.optimizer=@optimizers.{name}()", "LEARNING_RATE=0.25"])
    assert config.bindings_of(loop.train, "optimizer")["optimizer"].learning_rate(10**6) is not None
    assert notes == [] if name == "adam" else f"configs/base/{name}.gin goes with it: " in notes[0]
    defined = dict(re.findall(r"^(\w+) = (.*)", __import__("gin").config_str(), re.MULTILINE))
    assert defined["LEARNING_RATE"] == "0.25"


def test_an_optimizer_without_a_file_says_what_it_lacks():
    message = refusal(QUICKSTART, "train.optimizer=@optimizers.rmsprop()")
    assert message == "the config gives no value for rmsprop.learning_rate: give --gin.rmsprop.learning_rate=VALUE"
    rate = ["rmsprop.learning_rate=@optimizers.constant()", "optimizers.constant.rate=1e-3"]
    assert built(QUICKSTART, "train.optimizer=@optimizers.rmsprop()", *rate)["optimizer"].learning_rate(0) == 1e-3


@pytest.mark.parametrize(
    ("file", "bindings", "kinds"),
    [
        (QUICKSTART, ["PATTERN=slide sru rec"], ["SlidingWindowLayer", "SRULayer", "BlockRecurrentLayer"]),
        (QUICKSTART, ["MEMORY=100", "PATTERN=slide mem"], ["SlidingWindowLayer", "MemorizingLayer"]),
        (QUICKSTART, ["PATTERN=rt 2*lrn lstm"], ["RTransformerLayer", "LRNLayer", "RNNLayer"]),
        (
            SRU,
            ["PATTERN=slide sru", "WINDOW=8", "HEADS=2", "HEAD_DIM=8", "MLP_DIM=8"],
            ["SlidingWindowLayer", "SRULayer"],
        ),
    ],
)
def test_a_pattern_brings_the_layers_that_it_names(file, bindings, kinds):
    layers = built(file, *bindings)["model"].stack.layers
    assert [type(layer).__name__ for layer in layers] == kinds


def test_layers_that_are_brought_leave_what_the_config_says():
    """configs/base/recurrences.gin has no dropout and no final norm of its own here."""
    model = built(QUICKSTART, "PATTERN=sru rec", "DROPOUT=0.25")["model"]
    assert model.final_norm and model.dtype == "float32"
    assert [layer.dropout for layer in model.stack.layers] == [0.25, 0.25]


def test_a_layer_of_ones_own_keeps_its_name(tmp_path):
    """Here `lstm` is another layer than that of configs/base/baselines.gin, and takes no arguments."""
    file = tmp_path / "mine.gin"
    file.write_text(
        "from __gin__ import dynamic_registration\n"
        "from block_recurrent.layers import stack\n"
        "from models import transformer\n"
        f"include '{QUICKSTART}'\n"
        "stack.pattern.layers = {'lstm': @transformer.Positions}\n"
    )
    config.parse([str(file)], ["PATTERN=lstm"])
    assert [name for name in config.defined_names() if "RNNLayer" in name] == []
    assert [type(layer).__name__ for layer in built(str(file), "PATTERN=lstm")["model"].stack.layers] == ["Positions"]


def test_a_layer_whose_sizes_are_nowhere_names_them():
    message = refusal(SRU, "PATTERN=slide sru")
    assert "the config gives no value for HEADS, HEAD_DIM, MLP_DIM, WINDOW" in message
    given = [binding.replace("VALUE", "8") for binding in advised(message)[0]]
    assert len(built(SRU, "PATTERN=slide sru", *given)["model"].stack.layers) == 2


@pytest.fixture
def short_of_the_first_step(monkeypatch):
    """Training ends where everything is written but parameters."""
    monkeypatch.setattr(loop, "resume", lambda *_: (_ for _ in ()).throw(Preempted("before the first step")))


def begin(file, store, workdir, *bindings):
    given = [f"--gin.{binding}" for binding in (f"STORE={store.folder}", *bindings)]
    with pytest.raises(Preempted):
        train.main([f"--gin_file={file}", f"--workdir={workdir}", *given])


def test_a_run_with_a_brought_layer_and_optimizer_opens_again(corpus, tmp_path, short_of_the_first_step, capsys):
    brought = ["PATTERN=slide sru", "train.optimizer=@radam()", "make_mesh.data=1"]
    begin(TINY, corpus, tmp_path / "run", *brought)
    assert "configs/base/radam.gin goes with it: WARMUP = 16000, LEARNING_RATE = 0.0003" in capsys.readouterr().out
    layers = block_recurrent.open(tmp_path / "run").model.stack.layers
    assert [type(layer).__name__ for layer in layers] == ["SlidingWindowLayer", "SRULayer"]


@pytest.fixture(scope="module")
def without_vocabulary(tmp_path_factory):
    file = tmp_path_factory.mktemp("configs") / "tiny.gin"
    file.write_text(re.sub("VOCABULARY = .*\n", "", (ROOT / TINY).read_text()))
    return str(file)


def test_the_store_says_the_size_of_the_vocabulary(corpus, without_vocabulary, tmp_path, short_of_the_first_step):
    begin(without_vocabulary, corpus, tmp_path / "run")
    assert "VOCABULARY = 259\n" in (tmp_path / "run" / "config.gin").read_text()
    assert block_recurrent.open(tmp_path / "run").model.vocabulary_size == 259
    begin(TINY, corpus, tmp_path / "run")  # the same run as with a size


def test_a_size_that_no_name_holds_comes_from_the_store_too(without_vocabulary, tmp_path):
    file = tmp_path / "bare.gin"
    file.write_text(f"include '{without_vocabulary}'\nVOCABULARY = None\n")
    assert built(str(file), size=300)["model"].vocabulary_size == 300
    bare = (ROOT / "configs/base/sliding_window.gin").read_text()
    base = tmp_path / "sliding_window.gin"
    base.write_text(re.sub(".*vocabulary_size.*\n", "", bare))
    tiny = Path(without_vocabulary).read_text().replace("configs/base/sliding_window.gin", str(base))
    file.write_text(tiny)
    assert built(str(file), size=300)["model"].vocabulary_size == 300


def test_plan_takes_the_size_of_a_store_at_hand_and_says_what_to_give_without_one(corpus, without_vocabulary):
    config.parse([without_vocabulary], [f"STORE={corpus.folder}"])
    assert configured_training().model.vocabulary_size == 259
    config.parse([without_vocabulary], ["STORE=data/nowhere"])
    with pytest.raises(UserError, match="leaves the size of the vocabulary to its store") as error:
        configured_training()
    (binding,) = advised(str(error.value))[0]
    config.parse([without_vocabulary], [binding.replace("SIZE", "300")])
    assert configured_training().model.vocabulary_size == 300


def test_compare_takes_the_size_of_its_own_store(corpus, without_vocabulary, tmp_path):
    contender = compare.contender("tiny", without_vocabulary, [], None)
    compare.planned(contender, 0, [], corpus, tmp_path)
    assert config.vocabulary_size() == ("VOCABULARY", 259)
    sized = compare.contender("tiny", TINY, [], None)
    assert compare.cost(contender, [], 259) == compare.cost(sized, [], 1)


def test_a_vocabulary_too_small_is_refused_with_a_binding_that_works(corpus):
    model = built(TINY, "VOCABULARY=100")["model"]
    with pytest.raises(UserError, match="has 259 token ids, the model's vocabulary_size is 100") as error:
        check_vocabulary(model, corpus)
    check_vocabulary(built(TINY, "VOCABULARY=100", *advised(str(error.value))[0])["model"], corpus)


# A store of each kind, and a config for another.
STORES = {
    "text": {"vocabulary": {"kind": "sentencepiece", "size": 32000}},
    "music": {"vocabulary": {"kind": "notes", "size": 88}, "record": 11},
    "images with labels": {"vocabulary": {"kind": "pixels", "size": 256}, "labels": list("0123456789")},
    "text with labels": {"vocabulary": {"kind": "words", "size": 29513}, "labels": ["neg", "pos"]},
}


@pytest.mark.parametrize(
    ("kind", "file", "meant_for"),
    [
        ("text", "configs/music/lstm.gin", "music"),
        ("text", "configs/mnist/small.gin", "images with labels"),
        ("music", QUICKSTART, "text"),
        ("music", "configs/mnist/small.gin", "images with labels"),
        ("images with labels", QUICKSTART, "text"),
        ("text with labels", "configs/ptb/lstm.gin", "text"),
    ],
)
def test_data_of_another_kind_are_told_before_sizes(kind, file, meant_for):
    """And the config that the message names is for them, at the size that it may have to be given."""
    store = Store("data/mine", STORES[kind])
    with pytest.raises(UserError) as error:
        check_vocabulary(built(file)["model"], store)
    message = str(error.value)
    assert f"holds {kind}, and the model" in message and f"is for {meant_for}:" in message
    assert "vocabulary_size" not in message
    _, (advice,) = advised(message)
    check_vocabulary(built(advice, size=store.vocabulary_size)["model"], store)


def test_other_labels_are_told_with_a_binding_that_works():
    store = Store("data/mine", {"vocabulary": {"kind": "words", "size": 100}, "labels": ["a", "b", "c"]})
    with pytest.raises(UserError, match="has 3 labels, the model's head, Classifier, is for 2 of them") as error:
        check_vocabulary(built("configs/imdb/qrnn.gin")["model"], store)
    check_vocabulary(built("configs/imdb/qrnn.gin", *advised(str(error.value))[0])["model"], store)


def test_make_mesh_without_its_module_or_train_mesh_makes_the_mesh():
    assert "mesh" not in built(QUICKSTART)
    assert built(QUICKSTART, "make_mesh.data=1")["mesh"].shape == {"data": 1, "fsdp": 1, "tensor": 1}
    message = refusal(QUICKSTART, "make_mesh.data=2")
    assert message.startswith(
        "mesh data x fsdp x tensor = 2 x -1 x 1 does not cover the 1 device(s) here: their product"
    )


def test_a_file_that_binds_make_mesh_alone_makes_the_mesh(tmp_path):
    file = tmp_path / "mine.gin"
    file.write_text(
        "from __gin__ import dynamic_registration\n"
        "from block_recurrent.training import sharding\n"
        f"include '{QUICKSTART}'\n"
        "sharding.make_mesh.tensor = 1\n"
    )
    assert built(str(file))["mesh"].shape["tensor"] == 1


def test_sizes_of_a_mesh_that_training_does_not_use_are_refused():
    message = refusal(QUICKSTART, "make_mesh.data=1", "train.mesh=None")
    assert message.startswith("make_mesh.data is given, but train.mesh is None")
    assert built(QUICKSTART, "make_mesh.data=1", "train.mesh=None", *advised(message)[0])["mesh"].shape["data"] == 1


def test_documented_mesh_flags_lay_a_run_over_eight_devices(corpus, tmp_path):
    """README's flags with the quickstart's config, whose vocabulary does not divide, at small sizes, for a step."""
    program = (
        "import sys, jax\n"
        "jax.config.update('jax_num_cpu_devices', 8)\n"
        "from block_recurrent import train\n"
        "from block_recurrent.training import loop\n"
        "train.main(sys.argv[1:])\n"
    )
    sizes = ["DIM=16", "HEAD_DIM=8", "MLP_DIM=32", "WINDOW=8"]
    bindings = [*sizes, "train.segment=16", "PATTERN=slide", "train.health=False", "STEPS=1", f"STORE={corpus.folder}"]
    flags = [f"--gin.{binding}" for binding in (*bindings, "make_mesh.data=2", "make_mesh.tensor=4")]
    command = [sys.executable, "-c", program, f"--gin_file={QUICKSTART}", f"--workdir={tmp_path / 'run'}", *flags]
    made = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "8 cpu (cpu), mesh data 2 x fsdp 1 x tensor 4" in made.stdout
    assert "sharding.make_mesh.tensor = 4\n" in (tmp_path / "run" / "config.gin").read_text()


def test_arguments_of_what_is_never_called_are_refused():
    message = refusal(QUICKSTART, "Plateau.stop_after=4")
    assert message == "--gin.Plateau.stop_after has no effect: nothing in the config calls Plateau"
    assert built(QUICKSTART, "train.plateau=@Plateau()", "Plateau.stop_after=4")["plateau"].stop_after == 4


def test_a_name_of_a_fragment_is_told_with_the_file_that_defines_it():
    message = refusal(QUICKSTART, "STOP_AFTER=5")
    assert message.startswith("no gin name STOP_AFTER: configs/base/plateau.gin defines it; add --gin_file=")
    config.parse([QUICKSTART, *advised(message)[1]], ["STOP_AFTER=5", "VOCABULARY=259"])
    assert config.bindings_of(loop.train)["plateau"].stop_after == 5


@pytest.mark.parametrize(("name", "layer"), [("MEMORY", "mem"), ("POOLING", "qrnn"), ("LOCAL", "rt")])
def test_a_name_of_a_layer_is_told_with_the_layers_that_take_it(name, layer):
    message = refusal(QUICKSTART, f"{name}=5")
    (told,) = re.findall(r"give a --gin.PATTERN that names ([\w ]+)$", message)
    assert told.split(" or ") == [layer]
    value = "f" if name == "POOLING" else "5"
    assert built(QUICKSTART, f"PATTERN=slide {layer}", f"{name}={value}")


def test_a_command_without_gin_files_advises_none():
    with pytest.raises(UserError) as told:
        config.parse([QUICKSTART], ["STOP_AFTER=5"], takes_files=False)
    assert str(told.value).endswith("configs/base/plateau.gin defines it, which the config does not include")
    with pytest.raises(UserError) as told:
        config.parse([QUICKSTART], ["CONTEXT=512"], takes_files=False)
    assert "PATTERN" not in str(told.value)


def test_the_way_to_an_optimizer_without_a_file():
    """Each message is followed until there are no more."""
    bindings = ["train.optimizer=@optimizers.rmsprop()"]
    for value in ("0.001", None):
        (binding, *more), _ = advised(refusal(QUICKSTART, *bindings))
        bindings = [each for each in bindings if not each.startswith("rmsprop.")]
        bindings += [binding.replace("VALUE", str(value)), *(each.replace("RATE", "0.001") for each in more)]
    assert built(QUICKSTART, *bindings)["optimizer"].learning_rate(0) == pytest.approx(0.001)


@pytest.mark.parametrize(("name", "argument"), [("ROWS", "train.rows"), ("SEED", "train.seed"), ("CLIP", "adam.clip")])
def test_a_name_that_is_a_parameter_here_is_told_as_one(name, argument):
    message = refusal(QUICKSTART, f"{name}=5")
    (binding,), _ = advised(message)
    assert binding.endswith(f"{argument}=VALUE") and built(QUICKSTART, binding.replace("VALUE", "5"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("STEPZ", "no gin name STEPZ: did you mean STEPS?"),
        ("WARMPU", "no gin name WARMPU: did you mean WARMUP?"),
        ("EPOCH", "configs/base/ptb_words.gin, configs/base/sgd.gin define it, and the config includes none of them"),
        ("LEVELS", "no gin name LEVELS; block_recurrent.train with this --gin_file and --names lists what there is"),
    ],
)
def test_other_names_get_the_nearest_or_a_way_to_look(name, message):
    assert message in refusal(QUICKSTART, f"{name}=5")


def test_a_mistyped_optimizer_gets_the_nearest():
    assert "did you mean optimizers.radam?" in refusal(QUICKSTART, "train.optimizer=@optimizers.radm()")


def listed(capsys, file, *bindings):
    train.main([f"--gin_file={file}", "--names", *(f"--gin.{binding}" for binding in bindings)])
    rows = re.findall(r"^--gin\.(\S+) += (\S.*?)  +(\S.*)$", out := capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == out.count("\n"), "each has a value and a line about it"
    return {name: (value, about) for name, value, about in rows}


def test_names_lists_what_can_be_changed_without_a_workdir(capsys):
    names = listed(capsys, QUICKSTART)
    assert names["WINDOW"] == ("64", "tokens that a token attends to; segments are a multiple of it")
    assert names["STATES"][1] == "state vectors; the paper takes as many as the window has tokens"
    assert names["train.rows"] == ("6", "`rows` documents are read side by side, `segment` tokens of each a step")
    assert names["adam.clip"] == ("1.0", "largest norm of the gradient")
    assert names["BlockRecurrentLayer.states"] == ("%STATES", names["STATES"][1])
    assert names["train.seed"] == ("0", "`seed` draws parameters, dropout and the order of documents")
    assert names["train.accumulate"] == ("1", "`accumulate` splits the rows of a step")
    assert names["make_mesh.tensor"][0] == "1" and names["train.keep_best"][0] == "False"
    config.parse([QUICKSTART], [])
    assert set(map(config.short_name, config.defined_names())) < set(names)


def test_names_shows_values_of_the_command_line_and_of_brought_layers(capsys):
    names = listed(capsys, QUICKSTART, "PATTERN=slide sru", "HIGHWAY_BIAS=-1.0")
    assert names["HIGHWAY_BIAS"] == ("-1.0", "of SRU's reset gate, at the start")


@pytest.mark.parametrize("file", ["configs/ptb/tcn.gin", "configs/imdb/qrnn.gin", "configs/lm1b/srupp_base.gin"])
def test_names_has_a_line_on_everything_in_other_configs(file, capsys):
    assert listed(capsys, file)


def test_names_are_what_the_command_line_takes(capsys):
    numbers = {name: value for name, (value, _) in listed(capsys, QUICKSTART).items() if value.isdigit()}
    assert built(QUICKSTART, *(f"{name}={value}" for name, value in numbers.items()))


def test_training_without_a_workdir_is_told(capsys):
    with pytest.raises(SystemExit) as exit_code:
        run_command(train.main, [f"--gin_file={QUICKSTART}"])
    assert exit_code.value.code == MISTAKE and "--workdir" in capsys.readouterr().err


def test_an_edited_config_is_told_as_that_and_the_old_line_mends_it(corpus, tmp_path):
    workdir = tmp_path / "run"
    command = [f"--gin_file={TINY}", f"--workdir={workdir}", f"--gin.STORE={corpus.folder}", "--gin.STEPS=1"]
    train.main(command)
    file = workdir / "config.gin"
    before = file.read_text()
    file.write_text(before.replace("\nDIM = 16\n", "\nDIM = 32\n"))
    with pytest.raises(UserError, match=r"config\.gin was edited: DIM = 32 there was DIM = 16 in training") as error:
        _ = block_recurrent.open(workdir).params
    with pytest.raises(UserError, match=r"config\.gin was edited"):
        train.main(command)
    (line,) = re.findall(r"there was (DIM = \d+) in training", str(error.value))
    file.write_text(file.read_text().replace("\nDIM = 32", f"\n{line}"))
    assert file.read_text() == before and block_recurrent.open(workdir).params
    assert config.edited(epath.Path(workdir)) is None
