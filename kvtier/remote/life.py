"""The begin of a node's life: its incarnation, issued by the index where that can be reached in time."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvtier import logs
from kvtier.config import Config
from kvtier.errors import ConfigError, IndexFault, KvtierError
from kvtier.identity import Identity
from kvtier.interfaces import Index
from kvtier.types import PROTOCOL_VERSION, NodeRecord

REGISTER_TIMEOUT_S: Final = 1.0
MAX_INCARNATION: Final = 2**48
"""The index says nothing larger: one that was tampered with must not use up the numbers for ever."""

log = logs.get("life")


@dataclass(frozen=True, slots=True)
class Life:
    """One start of a node.

    Attributes
    ----------
    identity
        With the incarnation of this life.
    record
        What the index knows of it first: without an address.
    is_registered
        Whether the index issued the incarnation; otherwise it hears of it with the first heartbeat.
    """

    identity: Identity
    record: NodeRecord
    is_registered: bool


def new_life(identity: Identity, config: Config) -> Life:
    """A start of which the index has not heard yet."""
    record = NodeRecord(
        node=identity.node_id,
        incarnation=identity.incarnation,
        instance=uuid.uuid4().hex,
        name=config.node_name,
        address="",
        protocol_version=PROTOCOL_VERSION,
        capacity_bytes=config.dram_bytes,
        resident_bytes=0,
    )
    return Life(identity, record, is_registered=False)


async def begin_life(index: Index, identity: Identity, config: Config) -> Life:
    """Register, or go on without: a node serves what it holds whether or not the index can be reached.

    Raises
    ------
    ConfigError
        The index's address, user or password can never work.
    """
    life = new_life(identity, config)
    record = life.record
    try:
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            await index.open()
            incarnation = await index.register(record)
        if not record.incarnation <= incarnation < MAX_INCARNATION:
            raise IndexFault(f"it issues the incarnation {incarnation}: allowed is up to {MAX_INCARNATION}")
    except ConfigError:
        raise
    except (KvtierError, TimeoutError) as error:
        log.warning(
            "the index cannot be reached: this node begins without it and keeps trying",
            error=str(error) or "no answer in time",
        )
        return life
    return _adopt(record, identity, incarnation, config.data_dir)


def _adopt(record: NodeRecord, identity: Identity, incarnation: int, data_dir: Path) -> Life:
    if incarnation > identity.incarnation:
        log.info("the index knows a later life of this node: beginning after it", incarnation=incarnation)
        identity = identity.adopt(data_dir, incarnation)
    record = replace(record, incarnation=incarnation)
    return Life(identity, record, is_registered=True)
