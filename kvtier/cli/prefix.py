"""`kvtier lookup`, `pin`, `unpin` and `evict`: one prefix, named by its blocks' keys."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvtier.cli import output
from kvtier.cli.options import AsJson, ConfigFile, Socket, daemon
from kvtier.errors import InvalidRequest
from kvtier.types import KEY_SIZE_BYTES, Key, TierKind
from kvtier.v1 import admin_pb2 as pb

MAX_PIN_ID: Final = 2**64 - 1

Keys = Annotated[
    list[str] | None,
    typer.Argument(help="Keys of the prefix's blocks in order, 64 hex digits each.", show_default=False),
]
KeysFile = Annotated[
    Path | None,
    typer.Option("--keys-file", help="File with one key a line instead; - reads stdin.", show_default=False),
]


def lookup(
    keys: Keys = None,
    *,
    keys_file: KeysFile = None,
    here: Annotated[bool, typer.Option("--here", help="Only this node; the index is not asked.")] = False,
    config: ConfigFile = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Show every place of a prefix's blocks, and how many leading ones have one. Exit code 1: not the first.

    What other nodes have the index says: a hint, of which the owner knows the truth. A block with a holder
    lies in the memory of that engine, which alone can use it there.
    """
    chain = read_keys(keys, keys_file)
    with daemon(config, socket) as client:
        answer = client.lookup_prefix(chain, everywhere=not here)
        names = {node.node_id: node.name for node in client.list_nodes().nodes}
        is_blind = not here and not client.status().index_reachable
    places = [_place(place, names) for place in answer.places]
    if as_json:
        output.print_json({"blocks": answer.blocks, "asked": len(chain), "places": places})
    else:
        columns = (
            "index",
            "shard",
            "name",
            "tier",
            "holder",
            "replica",
            "pinned",
            "leases",
            "size_bytes",
            "offset_bytes",
        )
        output.print_table(
            f"{answer.blocks} of {len(chain)} leading blocks have a place",
            [column.removesuffix("_bytes") for column in columns],
            [[_cell(place[column]) for column in columns] for place in places],
            right=3,
        )
    if is_blind:
        output.print_error("the index cannot be reached: what other nodes have is not known")
    _end(answer.blocks > 0)


def _place(place: pb.BlockPlace, names: Mapping[str, str]) -> dict[str, Any]:
    """As JSON has it; what is not known of other nodes' blocks, and of engines', is None."""
    here: dict[str, Any] = {
        "arena_id": place.arena_id,
        "offset_bytes": place.offset_bytes,
        "size_bytes": place.size_bytes,
        "pinned": place.pinned,
        "leases": place.leases,
        "replica": place.replica,
    }
    return {
        "index": place.index,
        "shard": place.shard,
        "name": names.get(place.node_id, ""),
        "node_id": place.node_id,
        "incarnation": place.incarnation,
        "tier": TierKind(place.tier).name.lower(),
        "hint": place.hint,
        "holder": place.holder or None,
        **(dict.fromkeys(here) if place.hint or place.holder else here),
    }


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def pin(
    keys: Keys = None,
    *,
    keys_file: KeysFile = None,
    ttl_s: Annotated[
        float, typer.Option("--ttl-s", help="Seconds until the pin ends by itself.", min=0.001)
    ] = 3600.0,
    config: ConfigFile = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Protect a prefix from eviction for a time. Exit code 1: none of its blocks is here."""
    chain = read_keys(keys, keys_file)
    with daemon(config, socket) as client:
        answer = client.pin_prefix(chain, ttl_s)
    if as_json:
        output.print_json(
            {"pin_id": answer.pin_id, "pinned": answer.pinned, "asked": len(chain), "ttl_s": ttl_s}
        )
    elif answer.pinned:
        time = output.duration_text(ttl_s)
        print(f"pin {answer.pin_id} protects {answer.pinned} of {len(chain)} blocks for {time}")
    else:
        print("none of these blocks is here, nothing was pinned")
    _end(answer.pinned > 0)


def unpin(
    keys: Keys = None,
    *,
    keys_file: KeysFile = None,
    pin_id: Annotated[
        int | None,
        typer.Option(
            "--pin-id", help="The pin that `kvtier pin` named.", min=1, max=MAX_PIN_ID, show_default=False
        ),
    ] = None,
    config: ConfigFile = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """End one pin, or every pin on exactly this prefix. Exit code 1: there was none."""
    if pin_id is not None and (keys or keys_file):
        raise InvalidRequest("give --pin-id or keys, not both")
    chain = [] if pin_id is not None else read_keys(keys, keys_file)
    with daemon(config, socket) as client:
        answer = client.unpin_prefix(pin_id=pin_id) if pin_id is not None else client.unpin_prefix(chain)
    if as_json:
        output.print_json({"unpinned": answer.unpinned})
    else:
        print(f"{answer.unpinned} pins ended")
    _end(answer.unpinned > 0)


def evict(
    keys: Keys = None,
    *,
    keys_file: KeysFile = None,
    config: ConfigFile = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Drop blocks and all that continue them, except leased and pinned ones. Exit code 1: none dropped."""
    chain = read_keys(keys, keys_file)
    with daemon(config, socket) as client:
        answer = client.evict_prefix(chain)
    if as_json:
        output.print_json({"evicted": answer.evicted, "kept": answer.kept})
    else:
        print(f"{answer.evicted} blocks dropped, {answer.kept} kept because they are leased or pinned")
    _end(answer.evicted > 0)


def read_keys(keys: list[str] | None, keys_file: Path | None) -> list[Key]:
    """The keys that were given, from one of the two sources; raises `InvalidRequest`."""
    if bool(keys) == bool(keys_file):
        raise InvalidRequest("give the keys as arguments or in --keys-file, one of both")
    if keys_file is not None:
        try:
            text = sys.stdin.read() if str(keys_file) == "-" else keys_file.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{keys_file} cannot be read: {error}") from None
        keys = text.split()
        if not keys:
            raise InvalidRequest(
                f"{keys_file} holds no keys: one key a line, {2 * KEY_SIZE_BYTES} hex digits each"
            )
    assert keys
    return [_key(number, text) for number, text in enumerate(keys, start=1)]


def _key(number: int, text: str) -> Key:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_SIZE_BYTES or len(text) != 2 * KEY_SIZE_BYTES:
        raise InvalidRequest(
            f"key {number} is not {2 * KEY_SIZE_BYTES} hex digits (it has {len(text)} characters)"
        )
    return key


def _end(found: bool) -> None:
    if not found:
        raise typer.Exit(output.NEGATIVE)
