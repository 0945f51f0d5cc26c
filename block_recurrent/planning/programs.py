"""Reading a compiled program: what its devices exchange, and what its results take in their tiles."""

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](?:\{([\d,]*)(?::((?:T\([\d,*]+\))?(?:\([\d,]+\))*))?[^}]*\})?")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations|called_computations)=\{?((?:%?[\w.-]+(?:, )?)+)\}?")


@dataclass
class Computation:
    """Instructions by name: type, opcode, and the rest of the line."""

    name: str
    instructions: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    root: str = ""


def collectives(program: str) -> dict:
    """Collectives of one step by kind: how often each runs, and its bytes on one device.

    An exchange counts the larger of what goes in and what comes out. Those in a loop count as often as it runs; loops
    that do not tell how often are counted once, and told in `loops_of_unknown_length`.
    """
    computations, entry = computations_of(program)
    found = {kind: {"count": 0, "bytes": 0} for kind in COLLECTIVES}
    unknown = set()
    for name, times in times_run(computations, entry, unknown).items():
        for kind, size in exchanges_in(computations[name]):
            found[kind]["count"] += times
            found[kind]["bytes"] += times * size
    return {**found, "loops_of_unknown_length": len(unknown)}


def computations_of(program: str) -> tuple[dict[str, Computation], str]:
    """The computations of a program in HLO text, and the name of the one it begins with."""
    computations, current, entry = {}, None, ""
    for line in program.splitlines():
        if current is None:
            header = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$", line)
            if header:
                current = computations[header[2]] = Computation(header[2])
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            instruction = INSTRUCTION.match(line)
            if instruction:
                name, shape, opcode, rest = instruction.groups()
                current.instructions[name] = (shape, opcode, rest)
                current.root = name if line.lstrip().startswith("ROOT ") else current.root
    return computations, entry


def times_run(computations: dict[str, Computation], entry: str, unknown: set[str]) -> dict[str, int]:
    """How often each computation runs in one run of the program; loops of unknown length are put into `unknown`."""
    times: dict[str, int] = defaultdict(int)

    def run(name: str, often: int) -> None:
        times[name] += often
        for instruction, (_, opcode, rest) in computations[name].instructions.items():
            each = often
            if opcode == "while":
                length = trip_count(computations, computations[name], rest)
                if length is None and has_exchange(computations, called_by(rest)):
                    unknown.add(instruction)
                each = often * (1 if length is None else length)
            for called in called_by(rest):
                if called in computations and not goes_on(instruction, called):
                    run(called, each)

    run(entry, 1)
    return times


def goes_on(instruction: str, called: str) -> bool:
    """Whether a call goes on with, or ends, an exchange that was begun: a TPU's program writes it down in each."""
    return instruction.startswith("async-collective-done") or called.startswith("async_collective_fusion")


def called_by(rest: str) -> list[str]:
    return [name.strip().lstrip("%") for names in CALLED.findall(rest) for name in names.split(",") if name.strip()]


def has_exchange(computations: dict[str, Computation], names: list[str]) -> bool:
    """Whether any of some computations, or one that they call, exchanges something."""
    return any(
        exchanges_in(computations[name])
        or any(has_exchange(computations, called_by(rest)) for *_, rest in computations[name].instructions.values())
        for name in names
        if name in computations
    )


def trip_count(computations: dict[str, Computation], around: Computation, rest: str) -> int | None:
    """How often a loop runs: said by the compiler, or read off a condition `counter < constant`."""
    said = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', rest)
    if said:
        return int(said[1])
    condition = computations[re.search(r"condition=%?([\w.-]+)", rest)[1]]
    _, opcode, compared = condition.instructions[condition.root]
    operands = operands_of(compared)
    if opcode != "compare" or "direction=LT" not in compared or len(operands) != 2:
        return None
    counter, end = (condition.instructions.get(name, ("", "", "")) for name in operands)
    if end[1] != "constant" or counter[1] != "get-tuple-element":
        return None
    begin = first_value(around, operands_of(rest), int(re.search(r"index=(\d+)", counter[2])[1]))
    return int(end[2].partition(")")[0]) - begin


def first_value(around: Computation, operands: list[str], index: int) -> int:
    """Where a loop's counter begins: 0 unless a constant says otherwise."""
    _, opcode, rest = around.instructions.get(operands[0], ("", "", ""))
    if opcode != "tuple":
        return 0
    _, opcode, rest = around.instructions.get(operands_of(rest)[index], ("", "", ""))
    return int(rest.partition(")")[0]) if opcode == "constant" else 0


def operands_of(rest: str) -> list[str]:
    """Names of the operands at the beginning of the rest of an instruction's line."""
    return re.findall(r"%([\w.-]+)", rest.partition(")")[0])


def exchanges_in(computation: Computation) -> list[tuple[str, int]]:
    """Kind and bytes of the collectives that a computation itself runs."""
    found = []
    for shape, opcode, rest in computation.instructions.values():
        kind = opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        # A TPU adds up and keeps a part in one go, written as a sum with a slice around it.
        kind = "reduce-scatter" if computation.name.startswith("all-reduce-scatter") else kind
        results = [size_of(*match) for match in SHAPE.findall(shape)]
        if opcode.endswith("-start") and opcode != "all-reduce-start":
            results = results[len(results) // 2 :]  # operands come first
        operands = [computation.instructions.get(name, ("", "", ""))[0] for name in operands_of(rest)]
        given = sum(size_of(*match) for operand in operands for match in SHAPE.findall(operand))
        found.append((kind, max(sum(results), given)))
    return found


def size_of(dtype: str, dims: str, *_: str) -> int:
    """Bytes of an array without padding."""
    return math.ceil(math.prod(map(int, filter(None, dims.split(",")))) * bits_of(dtype) / 8)


def bits_of(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.match(r"[a-z]+(\d+)", dtype)[1])


def result_bytes(program: str) -> list[int]:
    """Bytes of each result of a program as a TPU lays it out, in whole tiles."""
    heading = program.partition("\n")[0]
    results = heading.partition("entry_computation_layout={")[2].partition(")->(")[2]
    return [padded_size(*match) for match in SHAPE.findall(results)]


def padded_size(dtype: str, dims: str, order: str, tiles: str) -> int:
    """Bytes of an array in tiles; `order` is its axes from minor to major, the first of `tiles` the tile."""
    sizes = [int(size) for size in dims.split(",") if size]
    laid_out = [sizes[int(axis)] for axis in reversed(order.split(","))] if order else sizes or [1]
    tile = [int(size) for size in re.match(r"T\(([\d,]+)\)", tiles)[1].split(",")] if tiles.startswith("T") else []
    laid_out = [1] * (len(tile) - len(laid_out)) + laid_out
    for i, size in enumerate(reversed(tile), start=1):
        laid_out[-i] = math.ceil(laid_out[-i] / size) * size
    return math.ceil(math.prod(laid_out) * bits_of(dtype) / 8)
