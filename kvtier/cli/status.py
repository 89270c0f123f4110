"""`kvtier status`: what the daemon of this node holds and does."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict

from kvtier.cli import output
from kvtier.cli.options import AsJson, ConfigFile, Socket, daemon
from kvtier.v1 import admin_pb2 as pb

_BYTES_OF_A_TIER = (
    ("capacity", "capacity_bytes"),
    ("allocated", "allocated_bytes"),
    ("resident", "resident_bytes"),
    ("reserved", "reserved_bytes"),
    ("quarantined", "quarantined_bytes"),
    ("draining", "draining_bytes"),
    ("leased", "leased_bytes"),
    ("pinned", "pinned_bytes"),
    ("old arenas", "old_arena_bytes"),
)


def status(*, config: ConfigFile = None, socket: Socket = None, as_json: AsJson = False) -> None:
    """Show the daemon of this node: tiers, engines, transfers, counters, notices."""
    with daemon(config, socket) as client:
        answer = client.status()
    if as_json:
        output.print_json(message_json(answer))
        return
    output.print_pairs("node", _node(answer))
    output.print_table(
        "tiers",
        ["tier", "blocks", *(title for title, _ in _BYTES_OF_A_TIER)],
        [
            [
                tier.name,
                str(tier.blocks),
                *(output.size_text(getattr(tier, field)) for _, field in _BYTES_OF_A_TIER),
            ]
            for tier in answer.tiers
        ],
        right=len(_BYTES_OF_A_TIER) + 1,
    )
    output.print_table(
        "engines",
        ["engine", "what", "slot", "leased", "reserved", "quarantined", "registered"],
        [
            [
                engine.engine_id,
                engine.description,
                output.size_text(engine.slot_bytes),
                output.size_text(engine.leased_bytes),
                output.size_text(engine.reserved_bytes),
                output.size_text(engine.quarantined_bytes),
                f"{output.duration_text(engine.registered_s)} ago",
            ]
            for engine in answer.engines
        ],
        right=5,
    )
    output.print_table(
        "transfers, best first",
        ["transfer", "state", "detail"],
        [[each.name, "usable" if each.usable else "not usable", each.detail] for each in answer.transfers],
    )
    counters = message_json(answer)["counters"]
    output.print_pairs("counters", {name.replace("_", " "): str(value) for name, value in counters.items()})
    for notice in answer.notices:
        output.print_error(notice)


def _node(answer: pb.GetStatusResponse) -> dict[str, str]:
    return {
        "node": answer.node_id,
        "incarnation": str(answer.incarnation),
        "version": answer.version,
        "state": answer.state,
        "up for": output.duration_text(answer.uptime_s),
        "index": _index(answer),
        "peers reach it at": answer.peer_address or "nowhere: other nodes cannot read from it",
        "metrics": answer.metrics_address or "off",
    }


def _index(answer: pb.GetStatusResponse) -> str:
    told = f"; {answer.unpublished} changes are not published yet" if answer.unpublished else ""
    return f"{answer.index}{'' if answer.index_reachable else '; cannot be reached'}{told}"


def message_json(answer: Any) -> dict[str, Any]:
    """A message of admin.proto with every field, numbers as numbers and bytes as hex."""
    return _jsonable(
        answer,
        MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
    )


def _jsonable(message: Any, value: dict[str, Any]) -> dict[str, Any]:
    """protobuf's JSON has 64-bit integers as texts and bytes in base64; operators want neither."""
    for field in message.DESCRIPTOR.fields:
        if field.name not in value:
            continue
        own = getattr(message, field.name)
        if field.message_type is None:
            value[field.name] = (
                own.hex()
                if isinstance(own, bytes)
                else list(own)
                if isinstance(value[field.name], list)
                else own
            )
        elif isinstance(value[field.name], list):
            for each, inner in zip(own, value[field.name], strict=True):
                _jsonable(each, inner)
        else:
            _jsonable(own, value[field.name])
    return value
