"""`kvtier nodes` and `kvtier node`: who shares the index, and what this node knows of each."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from kvtier.cli import output
from kvtier.cli.options import AsJson, ConfigFile, Socket, daemon
from kvtier.cli.status import message_json
from kvtier.errors import UnknownId
from kvtier.v1 import admin_pb2 as pb

FAILING = "failing"
_COLOURS = {"up": "green", FAILING: "red"}
_ID_DIGITS = 12


def nodes(*, config: ConfigFile = None, socket: Socket = None, as_json: AsJson = False) -> None:
    """Show every live node that shares this one's index. Exit code 1: the index cannot be reached."""
    with daemon(config, socket) as client:
        answer, status = client.list_nodes(), client.status()
    if as_json:
        output.print_json(
            {
                "index": status.index,
                "index_reachable": status.index_reachable,
                "nodes": [message_json(node) for node in answer.nodes],
            }
        )
    else:
        output.print_table(
            f"nodes, index {status.index}",
            [
                *("name", "node", "address", "state", "transfer"),
                *("resident", "capacity", "load", "pulled", "failed", "rate", "round trip"),
            ],
            [_row(node) for node in answer.nodes],
            right=7,
        )
        for node in answer.nodes:
            if node.last_error:
                output.print_error(f"{node.name}: {node.last_error}")
    if not status.index_reachable:
        output.print_error("the index cannot be reached: nodes that came or went since are not known")
        raise typer.Exit(output.NEGATIVE)


def node(
    name: Annotated[
        str, typer.Argument(help="Name of a node, its id, or an unambiguous beginning of it.", metavar="NODE")
    ],
    *,
    config: ConfigFile = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Show one node that shares this one's index. Exit code 1: it is not listed, or calls to it fail."""
    with daemon(config, socket) as client:
        try:
            found = client.get_node(name).node
        except UnknownId as error:
            output.print_error(str(error))
            raise typer.Exit(output.NEGATIVE) from None
    if as_json:
        output.print_json(message_json(found))
    else:
        output.print_pairs(f"node {found.name}", _pairs(found))
    if found.state == FAILING:
        raise typer.Exit(output.NEGATIVE)


def _row(node: pb.NodeStatus) -> list[str | Text]:
    return [
        f"{node.name} (this)" if node.is_self else node.name,
        node.node_id[:_ID_DIGITS],
        node.address or "none",
        Text(node.state, _COLOURS.get(node.state, "")),
        node.transfer,
        output.size_text(node.resident_bytes),
        output.size_text(node.capacity_bytes),
        f"{node.load:.0%}",
        "" if node.is_self else str(node.pulled_blocks),
        "" if node.is_self else str(node.failed_pulls),
        _rate(node),
        _round_trip(node),
    ]


def _pairs(node: pb.NodeStatus) -> dict[str, str]:
    pairs: dict[str, Any] = {
        "node": node.node_id,
        "name": f"{node.name} (this node)" if node.is_self else node.name,
        "incarnation": node.incarnation,
        "address": node.address or "none: other nodes cannot read from it",
        "state": node.state,
        "capacity": output.size_text(node.capacity_bytes),
        "resident": output.size_text(node.resident_bytes),
        "load": f"{node.load:.0%}",
    }
    if not node.is_self:
        pairs |= {
            "transfer": node.transfer or "not known yet",
            "measured rate": _rate(node) or "not measured yet",
            "round trip": _round_trip(node) or "not measured yet",
            "blocks pulled from it": node.pulled_blocks,
            "failed pulls": node.failed_pulls,
            "last error": node.last_error or "none",
        }
    return {name: str(value) for name, value in pairs.items()}


def _rate(node: pb.NodeStatus) -> str:
    return f"{output.size_text(int(node.pull_bytes_per_s))}/s" if node.pull_bytes_per_s else ""


def _round_trip(node: pb.NodeStatus) -> str:
    return f"{node.round_trip_s * 1000:.3g} ms" if node.round_trip_s else ""
