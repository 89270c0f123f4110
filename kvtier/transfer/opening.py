"""Which transfers this node has: tried, not guessed."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from kvtier import logs
from kvtier.config import Config
from kvtier.errors import Unavailable
from kvtier.interfaces import Remote, Transfer
from kvtier.transfer.coding import WIRE_CODECS, Count, count_nothing
from kvtier.transfer.environment import why_no_nixl
from kvtier.transfer.nixl import NixlTransfer
from kvtier.transfer.stream import StreamTransfer

ChannelOf = Callable[[Remote], grpc.aio.Channel]

_log = logs.get("transfer")


async def open_transfers(
    config: Config,
    memory: memoryview,
    channel_of: ChannelOf,
    node_id: str,
    report: Callable[[str, str], object] = lambda name, reason: None,
    count: Count = count_nothing,
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
    count
        Told what streams bring, for metrics.
    """
    opened: list[Transfer] = []
    try:
        for transfer in _wanted(config, channel_of, node_id, count):
            try:
                if isinstance(transfer, NixlTransfer) and (why := why_no_nixl(config)):
                    raise Unavailable(why)
                await transfer.open(memory)
            except Unavailable as error:
                _log.warning("a transfer cannot be used", transfer=transfer.name, why=str(error))
                report(transfer.name, str(error))
            else:
                opened.append(transfer)
    except BaseException:
        for transfer in opened:
            await transfer.close()
        raise
    return opened


def _wanted(config: Config, channel_of: ChannelOf, node_id: str, count: Count) -> list[Transfer]:
    wanted: list[Transfer] = []
    if config.transfer in ("auto", "nixl"):
        wanted.append(NixlTransfer(config.peer_host))
    if config.transfer in ("auto", "stream"):
        codecs = WIRE_CODECS if config.transfer_codec == "auto" else ()
        wanted.append(StreamTransfer(channel_of, node_id, codecs=codecs, count=count))
    return wanted
