"""Plans for people: one table, a column for each slice."""

import sys

from rich.console import Console
from rich.table import Table

from block_recurrent.planning.programs import COLLECTIVES
from block_recurrent.prices import Prices

NOT_KNOWN = "-"


def show(plans: list[dict], prices: Prices) -> None:
    """Prints plans side by side, and below them what is wrong and what to do."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(show_header=True, header_style="bold", pad_edge=False)
    table.add_column("")
    for plan in plans:
        table.add_column(plan["slice"], justify="right")
    columns = [lines(plan) for plan in plans]
    for name in columns[0]:
        if any(column[name] != NOT_KNOWN for column in columns):
            table.add_row(name, *(column[name] for column in columns))
    console.print(table)
    for plan in plans:
        for problem in plan["problems"]:
            console.print(f"{plan['slice']}: {problem}", soft_wrap=True, highlight=False, markup=False)
        for change in plan["advice"]:
            console.print(f"{plan['slice']}: try {change}", soft_wrap=True, highlight=False, markup=False)
    share = plans[0]["utilisation"]
    console.print(
        f"Times are estimates: matrix products of the model at {share:.0%} of the published peak and at "
        f"{share / 2:.0%}, exchanges between devices not counted.",
        soft_wrap=True,
        highlight=False,
    )
    if any(plan["cost"] for plan in plans):
        console.print(f"Costs are these times and the {prices}.", soft_wrap=True, highlight=False, markup=False)


def lines(plan: dict) -> dict[str, str]:
    """What the table says of one slice, by line; the same lines for every slice."""
    sizes, estimate, compiled = (plan[name] or {} for name in ("bytes_per_device", "estimate", "compiled"))
    mesh = plan["mesh"]
    found = {
        "devices": f"{plan['devices']} on {plan['hosts']} host(s)",
        "mesh data x fsdp x tensor": " x ".join(map(str, mesh.values())) if mesh else NOT_KNOWN,
        "parameters": f"{plan['parameters']:,}",
        "  without the embedding": f"{plan['parameters_without_embedding']:,}",
        "tokens per step": f"{plan['tokens_per_step']:,}",
        "rows per device": told(plan["rows_per_device"], "{:,}"),
        "model FLOPs per token": f"{plan['model_flops_per_token']:.3e}",
        "hardware FLOPs per token": f"{plan['hardware_flops_per_token']:.3e}",
        "per device: parameters": size(sizes.get("parameters")),
        "per device: optimizer": size(sizes.get("optimizer")),
        "per device: carried state": size(sizes.get("carried_state")),
        "estimate: step": told(estimate.get("seconds_per_step"), "{:.3g} s")
        + (f" ({estimate['bound_by']})" if estimate else ""),
        "estimate: tokens per second": told(estimate.get("tokens_per_second"), "{:,.0f}"),
        "estimate: steps": told(estimate.get("steps"), "{:,}"),
        "estimate: tokens": told(estimate.get("tokens"), "{:,}"),
        "estimate: time": between(estimate.get("hours_range"), "{:,.1f}", " h"),
        "estimate: chip-hours": between(chip_hours(plan), "{:,.0f}"),
        "estimate: cost on demand": between(plan["cost"].get("on_demand"), "${:,.0f}"),
        "estimate: cost spot": between(plan["cost"].get("spot"), "${:,.0f}"),
        "a device's HBM": size(plan["hbm_bytes"]),
        "compiler: HBM per device": size(compiled.get("used_bytes")),
        "  fits": verdict(compiled) if compiled else NOT_KNOWN,
        "compiler: seconds": told(compiled.get("compile_seconds"), "{:.0f}")
        + (" (before)" if compiled.get("cached") else ""),
    }
    exchanged = compiled.get("collectives") or {}
    for kind in COLLECTIVES:
        each = exchanged.get(kind)
        found[f"{kind} per step"] = f"{each['count']:,}, {size(each['bytes'])}" if each else NOT_KNOWN
    unknown = exchanged.get("loops_of_unknown_length")
    found["loops of unknown length, counted once"] = f"{unknown}" if unknown else NOT_KNOWN
    return found


def verdict(compiled: dict) -> str:
    return "yes" if compiled["fits"] else f"no, by {size(compiled['over_bytes'])}"


def chip_hours(plan: dict) -> list[float] | None:
    return [hours * plan["devices"] for hours in plan["estimate"]["hours_range"]] if plan["estimate"] else None


def between(ends: list[float] | None, layout: str, unit: str = "") -> str:
    """A range, or one figure where its ends look the same."""
    found = list(dict.fromkeys(layout.format(end) for end in ends or []))
    return " to ".join(found) + unit if found else NOT_KNOWN


def told(value, layout: str) -> str:
    return NOT_KNOWN if value is None else layout.format(value)


def size(count: int | None) -> str:
    """Bytes in the unit people think in."""
    if count is None:
        return NOT_KNOWN
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
