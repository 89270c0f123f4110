"""The command `kvtier`.

Commands live in modules of their own and are imported here; none of them imports torch or vLLM in this
process before it has to, so that `kvtier serve` starts at once.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

import kvtier
from kvtier.cli import output
from kvtier.cli.check import check
from kvtier.cli.demo import demo
from kvtier.cli.nodes import node, nodes
from kvtier.cli.prefix import evict, lookup, pin, unpin
from kvtier.cli.serve import serve
from kvtier.cli.status import status
from kvtier.errors import KvtierError

app = typer.Typer(
    name="kvtier",
    help="Keep the KV cache that LLM engines have computed, and give it back to them.",
    epilog=output.EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (serve, demo, status, nodes, node, lookup, pin, unpin, evict, check):
    app.command(epilog=output.EXIT_CODES)(command)


@app.command()
def version(
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Print the version."""
    if as_json:
        output.print_json({"version": kvtier.__version__})
    else:
        print(kvtier.__version__)


def main() -> None:
    """Entry point: a fault of kvtier is one clear message and an exit code, a bug is a traceback."""
    try:
        app()
    except KvtierError as error:
        output.print_error(str(error))
        sys.exit(output.exit_code(error))
    except Exception:
        traceback.print_exc()
        sys.exit(output.FAULT)  # 1, which Python would choose, means "no"


if __name__ == "__main__":
    main()
