"""Which transfers this node has: tried, not guessed."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from kvtier import logs
from kvtier.config import Config
from kvtier.errors import Unavailable
from kvtier.interfaces import Remote, Transfer
from kvtier.transfer.coding import WIRE_CODECS, Count, count_nothing
from kvtier.transfer.environment import is_loopback
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
                _check_trust(transfer, config)
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


def _check_trust(transfer: Transfer, config: Config) -> None:
    """Whoever asks for certificates does not get a transfer that knows none, unless it is named."""
    is_open = config.transfer == "nixl" or config.tls_cert_file is None or is_loopback(config.peer_host)
    if isinstance(transfer, NixlTransfer) and not is_open:
        raise Unavailable(
            "peers are asked for certificates, but NIXL neither encrypts nor authenticates what it sends: "
            "set transfer to 'nixl' where the network itself is trusted"
        )
