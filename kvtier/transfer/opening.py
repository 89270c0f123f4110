"""Which transfers this node has: tried, not guessed."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from kvtier import logs
from kvtier.config import Config
from kvtier.errors import Unavailable
from kvtier.interfaces import Remote, Transfer
from kvtier.transfer.stream import StreamTransfer

_log = logs.get("transfer")


async def open_transfers(
    config: Config,
    memory: memoryview,
    channel_of: Callable[[Remote], grpc.aio.Channel],
    node_id: str,
    report: Callable[[str, str], object] = lambda name, reason: None,
) -> list[Transfer]:
    """Those that work here, the best first.

    Parameters
    ----------
    memory
        The whole arena.
    channel_of
        For `stream`: the channel to a peer.
    node_id
        Of this node.
    report
        Told the name of each that is wanted and does not work, and why.
    """
    opened: list[Transfer] = []
    for transfer in [StreamTransfer(channel_of, node_id)]:
        try:
            await transfer.open(memory)
        except Unavailable as error:
            _log.warning("a transfer cannot be used", transfer=transfer.name, why=str(error))
            report(transfer.name, str(error))
        else:
            opened.append(transfer)
    return opened
