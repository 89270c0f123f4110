"""``python -m bench NAME [--json FILE] [--rounds N]``: run one benchmark and judge it.

Exit code 0: all targets reached; 1: one was missed; 3: void, since a denominator was too low.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import bench
from bench.common import MIN_ROUNDS, machine_facts

EXIT_OK, EXIT_MISSED, EXIT_VOID = 0, 1, 3
_NOT_BENCHMARKS = {"__main__", "common", "disk", "throttle"}


def main(argv: list[str] | None = None) -> int:
    """Run what the arguments name; returns the exit code."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(bench.__path__) if module.name not in _NOT_BENCHMARKS
    )
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=names, help="what to measure")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"at least {MIN_ROUNDS}")
    args, extra = parser.parse_known_args(argv)
    args.extra = extra
    begin_s = time.monotonic()
    result: dict[str, Any] = {
        "bench": args.name,
        "machine": machine_facts(),
        **importlib.import_module(f"bench.{args.name}").run(args),
    }
    result["seconds"] = time.monotonic() - begin_s
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return report(result)


def report(result: dict[str, Any]) -> int:
    """Print the targets; returns the exit code."""
    table = Table(title=f"bench {result['bench']}")
    for column in ("target", "value", "wanted", ""):
        table.add_column(column, justify="left" if column in ("target", "") else "right")
    for name, target in result["targets"].items():
        sign = "<=" if target.get("at_most", False) else ">="
        verdict = "[green]ok[/]" if target["ok"] else "[red]missed[/]"
        table.add_row(name, f"{target['value']:.4g}", f"{sign} {target['target']:.4g}", verdict)
    console = Console()
    console.print(table)
    if result.get("void"):
        console.print(f"[yellow]void:[/] {result['void']}")
        return EXIT_VOID
    return EXIT_OK if all(target["ok"] for target in result["targets"].values()) else EXIT_MISSED


if __name__ == "__main__":
    sys.exit(main())
