"""`kvtier demo`: real vLLMs that answer from KV they have lost, or never had."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli import output
from kvtier.demo.processes import Interrupted, interruptible
from kvtier.demo.result import REQUIRED_SHARE, Result
from kvtier.errors import InvalidRequest


def demo(
    json_file: Annotated[
        str | None,
        typer.Option("--json", help="Write the result to this file as JSON; - is stdout.", metavar="FILE"),
    ] = None,
) -> None:
    """Show with two nodes and a real vLLM on each that what one has computed the other one loads.

    Needs kvtier[vllm], about 9 GB of memory and 4 to 6 minutes. Exit code 0 only if all texts equal those of
    an engine without kvtier and at least 95 % of the whole blocks were loaded, from the node they should
    come from.
    """
    from kvtier.demo import scenario  # with it comes an HTTP client that no other command needs

    target = _target(json_file)
    progress = output.Progress()
    try:
        with interruptible(), progress.shown():
            result = scenario.run(progress)
    except Interrupted as interrupted:
        output.print_error(f"{interrupted}: everything that was started is gone")
        raise typer.Exit(output.SIGNALLED + interrupted.signum) from None
    if json_file == "-":
        output.print_json(result.to_json())
    else:
        if target is not None:
            _write(target, result)
        _print(result)
    if not result.ok:
        raise typer.Exit(output.NEGATIVE)


def _target(json_file: str | None) -> Path | None:
    """The file to write, found writable now and not after five minutes."""
    if json_file in (None, "-"):
        return None
    target = Path(json_file or "")
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise InvalidRequest(
            f"--json {target}: its directory is not there or not writable, or it is a directory"
        )
    if os.path.lexists(target):
        if not stat.S_ISREG(target.lstat().st_mode):
            raise InvalidRequest(f"--json {target}: allowed is a regular file, or a name that is free")
        target.unlink()  # an older result must not be taken for this run's
    return target


def _write(target: Path, result: Result) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    temporary.replace(target)


def _print(result: Result) -> None:
    cold_s = result.run("cold").ttft_s
    reference = ["without kvtier", "", "1", "computed", str(result.run("cold").prompt_tokens), "0"]
    rows = [[*reference, _ms(result.reference_ttft_s), "", "reference"]]
    rows += [
        [
            run.name,
            run.node,
            str(run.question),
            run.source,
            str(run.prompt_tokens),
            str(run.loaded_tokens),
            _ms(run.ttft_s),
            f"{cold_s / run.ttft_s:.1f}x",
            "equal" if run.text_equal else "DIFFERENT",
        ]
        for run in result.runs
    ]
    output.print_table(
        f"{result.model}, two nodes, bytes by {result.transfer}",
        ["run", "node", "question", "where from", "prompt", "loaded", "TTFT", "against cold", "text"],
        rows,
        right=5,
    )
    for number, text in enumerate(result.reference_texts, start=1):
        print(f"Answer {number}: ...{text}", file=sys.stderr)
    if not result.texts_equal:
        output.print_error(
            "a text differs from that without kvtier: see `kvtier demo --json -`, and report it"
        )
    if result.loaded_share < REQUIRED_SHARE:
        output.print_error(
            f"only {result.loaded_share:.1%} of the whole blocks were loaded in the worst run, "
            f"{REQUIRED_SHARE:.0%} are promised"
        )
    elif not result.came_from_the_other_node:
        output.print_error("what should have come from the other node did not: see `kvtier demo --json -`")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
