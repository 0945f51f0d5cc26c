"""What plan says of a run is what the run then holds, and what the compiler finds."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from block_recurrent import flops, plan, prices, slices
from block_recurrent.errors import UserError, run_command
from block_recurrent.planning import compiling, programs

ROOT = Path(__file__).parents[1]
TINY = ["--gin_file=tests/tiny.gin"]
SMALLEST = [*TINY, "--gin.PATTERN='slide'", "--gin.DROPOUT=0.0"]
RECURRENT = [*TINY, "--gin_file=configs/base/block_recurrent.gin", "--gin.STATES=8", "--gin.PATTERN='slide rec'"]
NEEDS_LIBTPU = pytest.mark.skipif(
    compiling.libtpu_version() is None, reason="the TPU compiler is not installed: pip install -r requirements-plan.txt"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "block_recurrent" / "plan"


@pytest.fixture
def planned(capsys):
    """Plans by the command, and reads the one document that it prints, whether the run fits or not."""

    def run(*arguments: str) -> dict:
        with contextlib.suppress(UserError):
            plan.main([*arguments, "--json"])
        return json.loads(capsys.readouterr().out)

    return run


HELD = """
import json, sys, jax
jax.config.update("jax_num_cpu_devices", 8)
from block_recurrent import config
from block_recurrent.plan import configured_training
from block_recurrent.training.sharding import make_mesh

def held(tree):
    found = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
    assert len(found) == 8 and len(set(found.values())) == 1, found
    return found[0]

def values(prefix):
    return [argument.removeprefix(prefix) for argument in sys.argv[1:] if argument.startswith(prefix)]

config.parse(values("--gin_file="), values("--gin."))
training = configured_training()
state = training.trainer(make_mesh(**training.mesh)).init(0)
parts = {"parameters": state.params, "optimizer": state.optimizer, "carried_state": state.memory}
print(json.dumps({name: held(part) for name, part in parts.items()}))
"""


@pytest.mark.slow
def test_bytes_of_shapes_are_those_that_eight_devices_hold(planned):
    split = ["--gin.VOCABULARY=260", "--gin.make_mesh.data=2", "--gin.FSDP=2", "--gin.make_mesh.tensor=2"]
    made = subprocess.run(
        [sys.executable, "-c", HELD, *RECURRENT, *split], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    held = json.loads(made.stdout.splitlines()[-1])
    told = planned(*RECURRENT, *split, "--slice=v5e-8", "--fast")["plans"][0]["bytes_per_device"]
    assert {part: told[part] for part in held} == held


def test_the_mesh_of_the_config_is_laid_over_the_slice(planned):
    plans = planned(*TINY, "--slice=v5e-4", "--slice=2xv5e-1", "--gin.train.rows=8", "--fast")["plans"]
    assert [tuple(found["mesh"].values()) for found in plans] == [(1, 4, 1), (2, 1, 1)]
    assert [found["rows_per_device"] for found in plans] == [2, 4]


def test_parameters_are_counted_with_and_without_the_embedding(planned):
    found = planned(*TINY, "--slice=v5e-1", "--fast")["plans"][0]
    assert found["parameters"] - found["parameters_without_embedding"] == 259 * 16


def test_layers_in_a_scan_count_as_often_as_they_run(planned):
    scanned, unrolled = (
        planned(*TINY, "--slice=v5e-1", "--fast", f"--gin.SCAN_DEPTH={on}")["plans"][0] for on in (True, False)
    )
    for kind in ("model_flops_per_token", "hardware_flops_per_token"):
        assert scanned[kind] == pytest.approx(unrolled[kind], rel=1e-3)


def test_recomputation_costs_hardware_flops_alone(planned):
    plain, again = (planned(*TINY, "--slice=v5e-1", "--fast", f"--gin.REMAT={on}")["plans"][0] for on in (False, True))
    assert again["model_flops_per_token"] == pytest.approx(plain["model_flops_per_token"], rel=1e-3)
    assert again["hardware_flops_per_token"] > plain["hardware_flops_per_token"] >= plain["model_flops_per_token"]


def test_model_flops_are_those_counted_by_hand():
    """Five products of a [3 4] by the trained [4 5]: themselves, and those of the one gradient they need."""

    @jax.checkpoint
    def product(x, w):
        return jnp.tanh(x @ w)

    def loss(w, xs):
        return jax.lax.scan(lambda total, x: (total + product(x, w).sum(), None), 0.0, xs)

    assert flops.training_flops(loss, jnp.ones((4, 5)), jnp.ones((5, 3, 4))) == 5 * 2 * (2 * 3 * 4 * 5)


def test_what_does_not_divide_is_told_with_the_rule_at_fault(planned):
    bindings = ["--gin.FSDP=1", "--gin.make_mesh.tensor=4", "--gin.MLP_DIM=30"]
    found = planned(*TINY, "--slice=v5e-4", *bindings, "--fast")["plans"][0]
    assert found["bytes_per_device"] is None and found["estimate"] is None
    for parameter, fault in {
        "(2, 16, 30)": "30 does not divide over tensor = 4 (rule mlp -> tensor)",
        "['layers_0']['relative_bias'] (2, 2, 32)": "2 does not divide over tensor = 4 (rule heads -> tensor)",
    }.items():
        assert any(parameter in line and fault in line for line in found["problems"]), found["problems"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--slice=v5e-8"], "4 rows do not divide over data x fsdp = 8"),
        (["--slice=v5e-4", "--gin.FSDP=3"], "does not cover the 4 device(s) of v5litepod-4"),
        (["--slice=2xv5e-4", "--gin.make_mesh.data=1"], "data is split over 2 slices"),
        (["--slice=v5e-4", "--gin.make_mesh.tensor='all'"], "mesh 1 x -1 x all: sizes are whole and positive"),
    ],
)
def test_a_mesh_or_batch_that_does_not_fit_the_slice_is_told(planned, arguments, told):
    assert told in planned(*TINY, *arguments, "--fast")["plans"][0]["problems"][0]


def test_time_follows_from_tokens_and_utilisation(planned):
    found = planned(*TINY, "--slice=h100-1", "--fast", "--gin.train.rows=65536", "--tokens=1e9", "--utilisation=0.01")
    found, peak = found["plans"][0], slices.find("h100-1").peak_flops
    estimate = found["estimate"]
    assert estimate["bound_by"] == "arithmetic" and estimate["steps"] == -(-(10**9) // (65536 * 16))
    by_hand = found["model_flops_per_token"] * found["tokens_per_step"] / (0.01 * peak)
    assert estimate["seconds_per_step"] == pytest.approx(by_hand)
    assert estimate["hours"] == pytest.approx(estimate["steps"] * by_hand / 3600)
    assert estimate["hours_range"] == pytest.approx([estimate["hours"], 2 * estimate["hours"]])
    assert found["cost"] == {}, "the file has no price of these chips"


def test_the_range_of_hours_is_multiplied_by_the_prices_of_a_file(planned, tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text("spot.v5e = 2\non_demand = {v5e = 5.0, v4 = 9}")
    found = planned(*TINY, "--slice=v5e-4", "--fast", f"--prices={file}")["plans"][0]
    hours = found["estimate"]["hours_range"]
    assert found["cost"] == {"on_demand": [each * 20 for each in hours], "spot": [each * 8 for each in hours]}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("on_demand.v5 = 1", "no chips are called 'v5': known are v4, v5e"),
        ("spot.v4 = -1", "the spot price of v4 is -1: give a number, 0 or more"),
        ("spot = 3", "spot is a table, [spot], with a line such as v5e = 1.20"),
        ("price.v4 = 3", "price is none of about, [on_demand] and [spot]"),
        ("v4 is dear", "is no file of prices"),
    ],
)
def test_a_file_of_prices_that_makes_no_sense_is_refused(tmp_path, text, told):
    (tmp_path / "prices.toml").write_text(text)
    with pytest.raises(UserError, match=re.escape(told)):
        prices.read_prices(tmp_path / "prices.toml")


def test_prices_of_ones_own_win_over_the_examples(tmp_path, cache):
    assert "check yours" in str(prices.read_prices()) and prices.read_prices().per_hour(slices.find("v4-8"), True)
    cache.parent.mkdir()
    (cache.parent / "prices.toml").write_text("on_demand.v4 = 7")
    own = prices.read_prices()
    assert own.per_hour(slices.find("2xv4-8"), False) == 56 and own.per_hour(slices.find("v4-8"), True) is None


def test_small_steps_are_bound_by_their_serial_chain(planned):
    found = planned(*TINY, "--slice=v5e-1", "--fast")["plans"][0]
    assert found["estimate"]["bound_by"] == "latency" and found["serial_iterations_per_step"] >= 2 * 2


def test_a_gpu_is_planned_by_shapes_alone(planned):
    found = planned(*TINY, "--slice=a100-80gb-4")
    assert found["plans"][0]["compiled"] is None and found["missing"] is None


def test_without_the_compiler_the_fast_part_works_and_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(compiling, "libtpu_version", lambda: None)
    plan.main([*TINY, "--slice=v4-8"])
    told = capsys.readouterr().out
    assert "8,452" in told and told.rstrip().endswith("pip install -r requirements-plan.txt")
    assert "temporary memory, compile time and collectives are left out" in told and "Without --fast" not in told


def test_a_run_that_does_not_fit_is_shown_and_ends_with_2(capsys, monkeypatch):
    """One slice that fits, one whose devices have no rows, one whose devices are too small for the state."""
    small = dataclasses.replace(slices.find("v5e-4"), name="small", hbm_bytes=1000)
    monkeypatch.setitem(slices.SLICES, "small-4", small)
    with pytest.raises(SystemExit) as stop:
        run_command(plan.main, [*TINY, "--slice=v5e-4", "--slice=v5e-8", "--slice=small-4", "--fast"])
    seen = capsys.readouterr()
    assert stop.value.code == 2 and "Without --fast the TPU's compiler says" in seen.out
    assert "small: small has 1,000 bytes a device, the train state alone is" in seen.out
    told = "error: the run does not fit v5litepod-8: 4 rows do not divide over data x fsdp = 8: take a multiple of 8"
    assert seen.err == f"{told} (and 1 more of the slices)\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--slice=v4-7"], "no slice is called 'v4-7': v4 has v4-8"),
        (["--slice=v4-8", "--utilisation=40"], "--utilisation: '40' is not a number above 0, 1 or less"),
        (["--slice=v4-8", "--tokens=0"], "--tokens: '0' is not a number, 1 or more"),
        (["--slice=v4-8", "--tokens=inf"], "--tokens: 'inf'"),
        (["--slice=v4-8", "--prices=nowhere.toml"], "nowhere.toml is no file of prices"),
        (["--slice=v4-8", "--gin.train.rows=0"], "train.rows is 0"),
        (["--slice=v4-8", "--gin.HEADS=0"], "SlidingWindowLayer.heads is 0: give a whole number, 1 or more"),
        (["--slice=v4-8", "--gin.STEP=1"], "no gin name STEP: did you mean STEPS?"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, told):
    with pytest.raises(SystemExit) as stop:
        run_command(plan.main, [*TINY, "--fast", *arguments])
    seen = capsys.readouterr()
    assert stop.value.code == 2 and seen.out == ""
    assert told in seen.err and len(seen.err.splitlines()) == 1


@pytest.fixture
def compiler_of_this_machine(monkeypatch):
    """This machine's device and compiler stand in for a slice of one chip."""
    monkeypatch.setattr(compiling, "libtpu_version", lambda: "none")
    monkeypatch.setattr(compiling, "slice_devices", lambda where: jax.devices()[:1])


@pytest.mark.usefixtures("compiler_of_this_machine")
def test_a_second_plan_of_the_same_step_is_not_compiled_again(planned, cache):
    first, second = (planned(*SMALLEST, "--slice=v5e-1")["plans"][0]["compiled"] for _ in range(2))
    assert (first.pop("cached"), second.pop("cached")) == (False, True)
    assert first == second and first["fits"] and len(list(cache.iterdir())) == 1


def test_a_damaged_report_is_not_believed(tmp_path):
    (tmp_path / "report.json").write_text('{"fits": tr')
    assert compiling.kept_report(tmp_path / "report.json") is None


@pytest.mark.usefixtures("compiler_of_this_machine")
def test_the_compiled_state_is_that_of_the_shapes(planned):
    found = planned(*SMALLEST, "--slice=v5e-1")["plans"][0]
    state = found["compiled"]["state"]
    assert state == {part: found["bytes_per_device"][part] for part in state}


OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (17.45G) exceeds available HBM (15.75G). HLO module: jit_step.\nSee https://openxla.org/..."
)


@pytest.mark.usefixtures("compiler_of_this_machine")
def test_a_step_that_does_not_fit_is_told_with_what_to_change(planned, monkeypatch):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(jax.stages.Lowered, "compile", exhausted)
    found = planned(*SMALLEST, "--slice=v5e-1")["plans"][0]
    assert not found["compiled"]["fits"] and "more HBM" in plan.failure(found)
    state = found["bytes_per_device"]["total"]
    assert 1.70 * 2**30 + state <= found["compiled"]["over_bytes"] + 2**20 <= 1.71 * 2**30 + state + 2**20
    assert any("--gin.REMAT=True" in line for line in found["advice"])
    assert any("--gin.train.accumulate=2" in line for line in found["advice"])


def test_another_error_of_the_compiler_is_not_taken_for_memory():
    assert compiling.out_of_memory("INTERNAL: Mosaic failed to compile TPU kernel", 0) is None


RESULTS = "(f32[8,4]{0,1:T(4,128)}, bf16[3,200]{1,0:T(4,128)(2,1)}, s32[]{:T(128)})"
PROGRAM = f"HloModule jit_step, entry_computation_layout={{(f32[8,4]{{1,0}})->{RESULTS}}}\n\n"
PROGRAM += """
%all-reduce-scatter.1 (x: f32[64]) -> f32[16] {
  %x = f32[64]{0} parameter(0)
  %all-reduce.9 = f32[64]{0} all-reduce(%x), to_apply=%add
  ROOT %slice = f32[16]{0} dynamic-slice(%all-reduce.9, %zero)
}

%begun (x: f32[8]) -> f32[32] {
  %x.1 = f32[8]{0} parameter(0)
  ROOT %all-gather.2 = f32[32]{0} all-gather(%x.1), dimensions={0}
}

%async_collective_fusion.1 (x: f32[8]) -> f32[32] {
  %x.2 = f32[8]{0} parameter(0)
  ROOT %all-gather.3 = f32[32]{0} all-gather(%x.2), dimensions={0}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %part = f32[8]{0} get-tuple-element(%p), index=1
  %all-gather.1 = f32[32]{0} all-gather(%part), dimensions={0}
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %part)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  %end = s32[] constant(12)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

%until (p: (s32[], f32[8])) -> pred[] {
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  ROOT %done = pred[] custom-call(%p.2)
}

ENTRY %main (a: f32[64]) -> f32[16] {
  %a = f32[64]{0} parameter(0)
  %zero = s32[] constant(0)
  %begin = (s32[], f32[8]{0}) tuple(%zero, %a)
  %while.1 = (s32[], f32[8]{0}) while(%begin), condition=%condition, body=%body
  %while.2 = (s32[], f32[8]{0}) while(%begin), condition=%until, body=%body
  %async-collective-start = f32[32]{0} fusion(%part), kind=kCustom, calls=%begun
  %fusion.1 = f32[32]{0} fusion(%part), kind=kOutput, calls=%async_collective_fusion.1
  %async-collective-done = f32[32]{0} fusion(%part), kind=kCustom, calls=%begun
  %sum = (f32[], bf16[4]{0}) all-reduce(%b, %c), to_apply=%add
  %start = (f32[8]{0}, f32[8]{0}) collective-permute-start(%part)
  %moved = f32[8]{0} collective-permute-done(%start)
  ROOT %scattered = f32[16]{0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_collectives_are_counted_as_often_as_they_run():
    assert programs.collectives(PROGRAM) == {
        "all-gather": {"count": 12 + 1 + 1, "bytes": 14 * 32 * 4},
        "reduce-scatter": {"count": 1, "bytes": 64 * 4},
        "all-reduce": {"count": 1, "bytes": 4 + 8},
        "all-to-all": {"count": 0, "bytes": 0},
        "collective-permute": {"count": 1, "bytes": 32},
        "loops_of_unknown_length": 1,
    }


def test_results_are_measured_in_whole_tiles():
    assert programs.result_bytes(PROGRAM) == [4 * 128 * 4, 4 * 256 * 2, 128 * 4]


@NEEDS_LIBTPU
@pytest.mark.slow
def test_the_tpu_compiler_agrees_within_five_percent(planned):
    """Sizes that fill tiles, as those of real models do."""
    sizes = ("VOCABULARY=1024", "DIM=512", "HEADS=8", "HEAD_DIM=128", "MLP_DIM=1024", "WINDOW=128", "train.segment=256")
    found = planned(*TINY, *(f"--gin.{size}" for size in sizes), "--slice=v5e-4")["plans"][0]
    assert found["compiled"]["fits"] and found["compiled"]["collectives"]["all-gather"]["count"]
    for part, measured in found["compiled"]["state"].items():
        assert found["bytes_per_device"][part] == pytest.approx(measured, rel=0.05), part


@NEEDS_LIBTPU
@pytest.mark.parametrize("name", ["v4-8", "v4-64", "v5e-1", "v5e-8", "v5e-32", "v5p-8", "v6e-16", "2xv5e-16"])
def test_the_tpu_compiler_knows_the_slice(name):
    where = slices.find(name)
    devices = compiling.slice_devices(where)
    assert len(devices) == where.devices
    assert len({device.process_index for device in devices}) == where.hosts * where.slices
