"""Says what a run will cost on a slice of accelerators, on a machine that has none: no data is opened, nothing runs.

python -m block_recurrent.plan --gin_file=configs/pg19/rec_fixed_skip.gin --slice=v4-64 --fast  # shapes alone, seconds
python -m block_recurrent.plan --gin_file=... --slice=v4-64 --slice=v5litepod-32  # compiled for each: minutes

Without --fast the real training step is compiled by the TPU's own compiler (pip install -r requirements-plan.txt), and
what it said is kept in ~/.cache/block_recurrent/plan. Slices: v4-64, v5litepod-32 (or v5e-32), v5p-128, v6e-64, two of
them 2xv5litepod-32; GPUs, by shapes alone: a100-80gb-8, h100-8. Where the run does not fit one of them, the exit code
is 2. Costs are hours times the prices of block_recurrent/prices.toml, or of a file of your own.
"""

import json
import os
import sys
from pathlib import Path

from block_recurrent.commandline import command_parser, gin_bindings
from block_recurrent.errors import UserError, first_line, run_command
from block_recurrent.prices import Prices, read_prices
from block_recurrent.ranges import Range
from block_recurrent.slices import find

LEFT_OUT = (
    "From shapes alone: activations, the compiler's temporary memory, compile time and collectives are left out, so a "
    "step that fits here may not fit the device."
)


def main(arguments: list[str]) -> None:
    parser = command_parser("plan", __doc__)
    parser.add_argument("--gin_file", action="append", required=True, help="a gin config; may be given several times")
    parser.add_argument("--slice", action="append", required=True, help="where to run; may be given several times")
    parser.add_argument("--fast", action="store_true", help="from shapes alone: nothing is compiled")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, and nothing else")
    parser.add_argument(
        "--tokens", type=Range(least=1), help="the budget to estimate time for; the config's steps by default"
    )
    parser.add_argument(
        "--utilisation",
        type=Range(above=0, most=1),
        default=0.4,
        help="share of the peak FLOP/s that estimates assume, and at worst half of it (default 0.4)",
    )
    parser.add_argument("--prices", type=Path, help="a file like block_recurrent/prices.toml")
    options, bindings = gin_bindings(parser, arguments)
    prices = read_prices(options.prices)
    slices = list(dict.fromkeys(map(find, options.slice)))
    # A TPU or GPU that is here is left to others, and no metadata server is asked about it.
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

    from block_recurrent import config
    from block_recurrent.planning import compiling, tables

    config.parse(options.gin_file, bindings)
    training = configured_training()
    found = make_plans(training, slices, options.tokens, options.utilisation, options.fast)
    for report, where in zip(found, slices, strict=True):
        report["cost"] = cost(report["estimate"], where, prices)
    left_out = LEFT_OUT if any(report["compiled"] is None for report in found) else None
    on_tpus = any(where.kind == "tpu" for where in slices)
    if left_out and options.fast and on_tpus:
        left_out += " Without --fast the TPU's compiler says."
    needed = not options.fast and on_tpus
    missing = compiling.MISSING if needed and compiling.libtpu_version() is None else None
    if options.json:
        document = {"gin_files": options.gin_file, "bindings": bindings, "store": store_of_config(), "plans": found}
        print(json.dumps(document | {"missing": missing, "left_out": left_out, "prices": str(prices)}, indent=2))
    else:
        tables.show(found, prices)
        print(*filter(None, (left_out, missing)), sep="\n")
    if failures := [f"{report['slice']}: {told}" for report in found if (told := failure(report))]:
        more = f" (and {len(failures) - 1} more of the slices)" if len(failures) > 1 else ""
        raise UserError(f"the run does not fit {failures[0]}{more}")


def failure(report: dict) -> str | None:
    """Why a run cannot be on a slice, as far as its report knows."""
    if report["problems"]:
        return report["problems"][0]
    compiled = report["compiled"]
    return "the compiler needs more HBM than a device has" if compiled and not compiled["fits"] else None


def cost(estimate: dict | None, where, prices: Prices) -> dict[str, list[float]]:
    """Dollars at the estimate's shortest and longest time, for each kind of price that the file has."""
    found = {}
    for kind, spot in (("on_demand", False), ("spot", True)):
        per_hour = prices.per_hour(where, spot)
        if estimate and per_hour is not None:
            found[kind] = [hours * per_hour for hours in estimate["hours_range"]]
    return found


def store_of_config() -> str | None:
    """The data that the parsed config trains on, by the name that it has there."""
    from block_recurrent import config
    from block_recurrent.training.loop import train

    return config.bindings_of(train, "store")["store"] if "store" in config.names_given_to(train) else None


def configured_training(vocabulary_size: int | None = None):
    """The run of the parsed config, without its data and with no more of its mesh than the sizes.

    A config without the size of a vocabulary is given this one, or that of its store.
    """
    from block_recurrent import config
    from block_recurrent.planning.shapes import Training
    from block_recurrent.training.loop import check_arguments, train
    from block_recurrent.training.sharding import make_mesh

    given = config.names_given_to(train)
    missing = sorted({"model", "optimizer", "steps", "rows", "segment"} - given)
    if missing:
        raise UserError(f"the config gives no value for {', '.join(f'train.{name}' for name in missing)}")
    config.fill_vocabulary(lambda store: vocabulary_size or size_of_vocabulary(store))
    settings = config.bindings_of(train, *given - {"mesh"})
    check_arguments(settings)
    names = given & {"model", "optimizer", "steps", "rows", "segment", "accumulate", "health"}
    settings = {"accumulate": 1, "health": False, **{name: settings[name] for name in names}}
    mesh = {}
    if "mesh" in given and (sizes := config.names_given_to(make_mesh) & {"data", "fsdp", "tensor"}):
        mesh = config.bindings_of(make_mesh, *sizes)
    return Training(**settings, mesh=mesh)


def size_of_vocabulary(store: str) -> int:
    """The size that a store at hand has."""
    from block_recurrent.data.store import open_store

    try:
        return open_store(store).vocabulary_size
    except Exception as error:  # clients of buckets have errors of their own
        raise UserError(
            "the config leaves the size of the vocabulary to its store, which cannot be read here: give "
            f"--gin.VOCABULARY=SIZE ({first_line(error)})"
        ) from error


def make_plans(training, slices: list, tokens: float | None, utilisation: float, fast: bool) -> list[dict]:
    """One report a slice: of shapes, and of the compiler where it can be had."""
    from block_recurrent.planning.compiling import advice, libtpu_version, plan_of_compiler
    from block_recurrent.planning.shapes import count_work, plan_of_shapes

    budget = training.steps * training.tokens_per_step if tokens is None else int(tokens)
    work, plans = {}, []
    for where in slices:
        if where.kind not in work:
            work[where.kind] = count_work(training, where.kind)
        report = plan_of_shapes(training, where, work[where.kind], budget, utilisation)
        report |= {"compiled": None, "advice": []}
        if not fast and where.kind == "tpu" and report["bytes_per_device"] and libtpu_version() is not None:
            print(f"compiling for {where.name} (minutes, unless it was done before) ...", file=sys.stderr, flush=True)
            report["compiled"] = plan_of_compiler(training, where)
        too_large = report["compiled"] and not report["compiled"]["fits"]
        if report["bytes_per_device"] and (too_large or report["problems"]):
            report["advice"] = advice(training, report)
        plans.append(report)
    return plans


if __name__ == "__main__":
    run_command(main)
