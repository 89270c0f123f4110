"""What every transfer has to pass, with real processes as peers, as a pytest class to subclass.

.. code-block:: python

    class TestMyTransfer(TransferTests):
        @pytest.fixture
        def make_transfer(self):
            return MyTransfer

        @pytest.fixture
        def start_peer(self):
            ...  # yields a callable (node, incarnation, seed) -> PeerProcess, and ends them all

A peer is a process of its own that offers `ARENA_BYTES` of ``content(seed)``, a method; it may serve several
tests, as long as it lives. Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import pytest
import pytest_asyncio

from kvtier.errors import TransferFault
from kvtier.interfaces import Remote, Transfer

ARENA_BYTES: Final = 32 << 20
BLOCK_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 20.0
SHORT_S: Final = 0.5
"""Of a pull that cannot end."""
SETTLE_S: Final = 0.5
"""Whoever still wrote would do so within this."""
OTHER: Final = 0xEE
"""What others write into slots that a failed pull has given back."""
NODE: Final = "0" * 31 + "1"
NODE_2: Final = "0" * 31 + "2"


class PeerProcess(ABC):
    """Another node's arena, in a process that can be stopped and killed."""

    @property
    @abstractmethod
    def remote(self) -> Remote:
        """How it is read from, all of it, for as long as it lives."""

    @abstractmethod
    def stop(self) -> None:
        """SIGSTOP everything that belongs to it."""

    @abstractmethod
    def go_on(self) -> None:
        """SIGCONT it."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL it; idempotent."""


MakeTransfer = Callable[[], Transfer]
StartPeer = Callable[[str, int, int], PeerProcess]


def content(seed: int) -> bytes:
    """What the arena of a peer holds."""
    return np.random.default_rng(seed).bytes(ARENA_BYTES)


def shared_memory(size_bytes: int = ARENA_BYTES) -> mmap.mmap:
    """An arena: shared memory without a name."""
    fd = os.memfd_create("kvtier-test")
    try:
        os.ftruncate(fd, size_bytes)
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)


@pytest.mark.asyncio
class TransferTests:
    """Subclass it, give `make_transfer` and `start_peer`, and the transfer is tested."""

    @pytest.fixture
    def make_transfer(self) -> MakeTransfer:
        """Override: a callable that makes a closed transfer."""
        raise NotImplementedError("a subclass of TransferTests defines the fixture make_transfer")

    @pytest.fixture
    def start_peer(self) -> Iterator[StartPeer]:
        """Override: a callable that starts a peer; all of them end with the test."""
        raise NotImplementedError("a subclass of TransferTests defines the fixture start_peer")

    def content(self, seed: int) -> bytes:
        """Override where peers hold something else."""
        return content(seed)

    @pytest.fixture
    def peer(self, start_peer: StartPeer) -> PeerProcess:
        """A peer with ``content(1)``."""
        return start_peer(NODE, 1, 1)

    @pytest.fixture
    def memory(self) -> memoryview:
        """The own arena, all zeros."""
        return memoryview(shared_memory())

    @pytest_asyncio.fixture
    async def transfer(self, make_transfer: MakeTransfer, memory: memoryview) -> AsyncIterator[Transfer]:
        """An open transfer."""
        transfer = make_transfer()
        await transfer.open(memory)
        yield transfer
        await transfer.close()

    # ---- bytes

    async def test_what_is_there(self, transfer: Transfer, peer: PeerProcess, memory: memoryview) -> None:
        """Blocks of odd sizes, from and to odd places, in any order; what lies between stays."""
        dice = random.Random(3)
        wanted = bytearray(ARENA_BYTES)
        theirs = self.content(1)
        places = dice.sample(range(ARENA_BYTES // BLOCK_BYTES), 20)
        sources = [dice.randrange(ARENA_BYTES - BLOCK_BYTES) for _ in places]
        sizes = [dice.choice([1, 511, 4096, 737_280, BLOCK_BYTES]) for _ in places]
        into = [
            place * BLOCK_BYTES + dice.randrange(BLOCK_BYTES - size + 1)
            for place, size in zip(places, sizes, strict=True)
        ]
        for source, size, begin in zip(sources, sizes, into, strict=True):
            wanted[begin : begin + size] = theirs[source : source + size]
        await transfer.pull(peer.remote, sources, sizes, into, TIMEOUT_S)
        assert memory == wanted

    async def test_everything_at_once_and_in_parts(
        self, transfer: Transfer, peer: PeerProcess, memory: memoryview
    ) -> None:
        """The whole arena in one piece, and in pulls that run beside each other."""
        theirs = self.content(1)
        await transfer.pull(peer.remote, [0], [ARENA_BYTES], [0], TIMEOUT_S)
        assert memory == theirs
        memory[:] = bytes(ARENA_BYTES)
        offsets = list(range(0, ARENA_BYTES, BLOCK_BYTES))
        await asyncio.gather(
            *(
                transfer.pull(peer.remote, part, [BLOCK_BYTES] * len(part), part, TIMEOUT_S)
                for part in (offsets[i : i + 4] for i in range(0, len(offsets), 4))
            )
        )
        assert memory == theirs

    async def test_nothing(self, transfer: Transfer, peer: PeerProcess) -> None:
        """No block is fine."""
        await transfer.pull(peer.remote, [], [], [], TIMEOUT_S)

    async def test_two_peers(
        self, transfer: Transfer, peer: PeerProcess, start_peer: StartPeer, memory: memoryview
    ) -> None:
        """Nobody's bytes are taken for another's."""
        other = start_peer(NODE_2, 1, 2)
        half = ARENA_BYTES // 2
        await asyncio.gather(
            transfer.pull(peer.remote, [half], [half], [0], TIMEOUT_S),
            transfer.pull(other.remote, [0], [half], [half], TIMEOUT_S),
        )
        assert memory == self.content(1)[half:] + self.content(2)[:half]

    async def test_a_new_life(
        self, transfer: Transfer, peer: PeerProcess, start_peer: StartPeer, memory: memoryview
    ) -> None:
        """The next incarnation of a node has another arena; the old one is never read again."""
        await transfer.pull(peer.remote, [0], [BLOCK_BYTES], [0], TIMEOUT_S)
        old = peer.remote
        peer.kill()
        following = start_peer(NODE, 2, 2)
        await transfer.pull(following.remote, [0], [BLOCK_BYTES], [0], TIMEOUT_S)
        assert memory[:BLOCK_BYTES] == self.content(2)[:BLOCK_BYTES]
        with pytest.raises(TransferFault):
            await transfer.pull(old, [0], [BLOCK_BYTES], [0], SHORT_S)

    # ---- what cannot be

    async def test_ranges_that_do_not_fit(
        self, transfer: Transfer, peer: PeerProcess, memory: memoryview
    ) -> None:
        """Each is a fault before a byte moves, and the next pull works."""
        end, block = ARENA_BYTES, BLOCK_BYTES
        for sources, sizes, into in (
            ([0], [block], [end - block + 1]),
            ([0], [block], [-1]),
            ([0], [0], [0]),
            ([0], [-block], [block]),
            ([-block], [block], [0]),
            ([2**64 - 4096], [block], [0]),
            ([0, 0], [block], [0]),
            ([0], [block], [0, block]),
            ([0], [end + 1], [0]),
            ([0, 0], [block, block], [0, end]),
        ):
            with pytest.raises(TransferFault):
                await transfer.pull(peer.remote, sources, sizes, into, TIMEOUT_S)
        assert memory == bytes(ARENA_BYTES)
        await transfer.pull(peer.remote, [0], [ARENA_BYTES], [0], TIMEOUT_S)

    async def test_beyond_the_peers_arena(
        self, transfer: Transfer, peer: PeerProcess, memory: memoryview
    ) -> None:
        """The peer's memory outside its arena is not to be had."""
        for source in (ARENA_BYTES - BLOCK_BYTES + 1, ARENA_BYTES, 2**62):
            with pytest.raises(TransferFault):
                await transfer.pull(peer.remote, [0, source], [BLOCK_BYTES] * 2, [0, BLOCK_BYTES], TIMEOUT_S)
        assert memory[BLOCK_BYTES:] == bytes(ARENA_BYTES - BLOCK_BYTES)

    async def test_metadata_is_small_and_garbage_is_a_fault(
        self, transfer: Transfer, peer: PeerProcess, memory: memoryview
    ) -> None:
        """Where a peer's metadata counts, any that is damaged is a fault; then the right one works."""
        assert len(transfer.metadata()) <= 64 << 10
        right = peer.remote.metadata
        if right:
            dice = random.Random(5)
            flipped = bytearray(right)
            flipped[dice.randrange(len(right))] ^= 1 << dice.randrange(8)
            for wrong in (
                b"",
                b"\0",
                right[:-1],
                right + b"\0",
                right[:20],
                bytes(flipped),
                dice.randbytes(len(right)),
                dice.randbytes(70_000),
                transfer.metadata(),
            ):
                with pytest.raises(TransferFault):
                    await transfer.pull(
                        replace(peer.remote, metadata=wrong), [0], [BLOCK_BYTES], [0], TIMEOUT_S
                    )
            assert memory == bytes(ARENA_BYTES)
        await transfer.pull(peer.remote, [0], [ARENA_BYTES], [0], TIMEOUT_S)
        assert memory == self.content(1)

    # ---- peers that die or say nothing

    async def test_a_dead_peer(
        self, transfer: Transfer, peer: PeerProcess, start_peer: StartPeer, memory: memoryview
    ) -> None:
        """A fault, known or unknown before; others can be read from."""
        await transfer.pull(peer.remote, [0], [BLOCK_BYTES], [0], TIMEOUT_S)
        remote = peer.remote
        peer.kill()
        with pytest.raises(TransferFault):
            await transfer.pull(remote, [0], [ARENA_BYTES], [0], TIMEOUT_S)
        other = start_peer(NODE_2, 1, 2)
        await self._eventually(transfer, other, memory, self.content(2))

    async def test_killed_in_the_middle(
        self, transfer: Transfer, peer: PeerProcess, start_peer: StartPeer, memory: memoryview
    ) -> None:
        """A fault, or the right bytes; and nothing is written later."""
        await self._pull_while(transfer, peer, memory, peer.kill)
        other = start_peer(NODE_2, 1, 2)
        await self._eventually(transfer, other, memory, self.content(2))

    async def test_stopped(
        self, transfer: Transfer, peer: PeerProcess, start_peer: StartPeer, memory: memoryview
    ) -> None:
        """A peer that is silent from the beginning, and one that falls silent in the middle: when the pull
        has ended the slots belong to others, also when the peer goes on.
        """
        other = start_peer(NODE_2, 1, 2)
        peer.stop()
        try:
            with pytest.raises(TransferFault):
                await transfer.pull(peer.remote, [0], [ARENA_BYTES], [0], SHORT_S)
            memory[:] = bytes([OTHER]) * ARENA_BYTES
        finally:
            peer.go_on()
        await asyncio.sleep(SETTLE_S)
        assert memory == bytes([OTHER]) * ARENA_BYTES
        await self._pull_while(transfer, other, memory, other.stop, other.go_on)

    async def test_cancelled(self, transfer: Transfer, peer: PeerProcess, memory: memoryview) -> None:
        """Once a cancelled pull has ended nothing is written any more; the next one works."""
        for turns in (0, 1, 3):
            task = asyncio.create_task(transfer.pull(peer.remote, [0], [ARENA_BYTES], [0], TIMEOUT_S))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            memory[:] = bytes([OTHER]) * ARENA_BYTES
            await asyncio.sleep(0.1)
            assert memory == bytes([OTHER]) * ARENA_BYTES
        await self._eventually(transfer, peer, memory, self.content(1))

    async def _pull_while(
        self,
        transfer: Transfer,
        peer: PeerProcess,
        memory: memoryview,
        happens: Callable[[], None],
        afterwards: Callable[[], None] = lambda: None,
    ) -> None:
        """Pull everything; something happens to the peer as soon as the first byte is here."""
        memory[:] = bytes(ARENA_BYTES)
        theirs = self.content(int(peer.remote.node[-1]))
        first = next(offset for offset in range(ARENA_BYTES) if theirs[offset])
        offsets = list(range(0, ARENA_BYTES, BLOCK_BYTES))
        task = asyncio.create_task(
            transfer.pull(peer.remote, offsets, [BLOCK_BYTES] * len(offsets), offsets, 2.0)
        )
        while not memory[first] and not task.done():
            await asyncio.wait([task], timeout=0)
        happens()
        try:
            await task
        except TransferFault:
            pass
        else:
            assert memory == theirs
        memory[:] = bytes([OTHER]) * ARENA_BYTES
        afterwards()
        await asyncio.sleep(SETTLE_S)
        assert memory == bytes([OTHER]) * ARENA_BYTES

    async def _eventually(
        self, transfer: Transfer, peer: PeerProcess, memory: memoryview, wanted: bytes
    ) -> None:
        """Everything can be pulled, if not at once: the transfer may have to renew what failed."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    await transfer.pull(peer.remote, [0], [ARENA_BYTES], [0], TIMEOUT_S)
                    break
                except TransferFault:
                    await asyncio.sleep(0.05)
        assert memory == wanted

    # ---- life

    async def test_forget(self, transfer: Transfer, peer: PeerProcess, memory: memoryview) -> None:
        """Of one that is known, or not; it can be read from again."""
        await transfer.forget(NODE_2)
        for _ in range(3):
            memory[:] = bytes(ARENA_BYTES)
            await transfer.pull(peer.remote, [0], [ARENA_BYTES], [0], TIMEOUT_S)
            assert memory == self.content(1)
            await transfer.forget(NODE)
            await transfer.forget(NODE)

    async def test_forget_in_the_middle(
        self, transfer: Transfer, peer: PeerProcess, memory: memoryview
    ) -> None:
        """What is under way arrives, or is a fault."""
        task = asyncio.create_task(transfer.pull(peer.remote, [0], [ARENA_BYTES], [0], TIMEOUT_S))
        await asyncio.sleep(0.005)
        await transfer.forget(NODE)
        try:
            await task
        except TransferFault:
            pass
        else:
            assert memory == self.content(1)
        await self._eventually(transfer, peer, memory, self.content(1))

    async def test_closed_is_a_fault(
        self, make_transfer: MakeTransfer, peer: PeerProcess, memory: memoryview
    ) -> None:
        """Before open and after close; close may be repeated, and comes without open too."""
        transfer = make_transfer()
        for _ in range(2):
            with pytest.raises(TransferFault):
                await transfer.pull(peer.remote, [0], [BLOCK_BYTES], [0], TIMEOUT_S)
            await transfer.serve(0.1)
            await transfer.forget(NODE)
            await transfer.close()
            await transfer.close()
            await transfer.open(memory)
            await transfer.close()

    async def test_close_in_the_middle(
        self, make_transfer: MakeTransfer, peer: PeerProcess, memory: memoryview
    ) -> None:
        """Pulls end, and nothing is written afterwards."""
        transfer = make_transfer()
        await transfer.open(memory)
        task = asyncio.create_task(transfer.pull(peer.remote, [0], [ARENA_BYTES], [0], TIMEOUT_S))
        await asyncio.sleep(0.002)
        await transfer.close()
        memory[:] = bytes([OTHER]) * ARENA_BYTES
        await asyncio.wait([task])
        assert task.exception() is None or isinstance(task.exception(), TransferFault)
        await asyncio.sleep(SETTLE_S)
        assert memory == bytes([OTHER]) * ARENA_BYTES
