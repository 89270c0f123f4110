"""The engine's own KV events over ZeroMQ: a subscription that asks for what it missed, where it can.

A message is ``[topic, sequence number (8 bytes, big endian), batch]``. A number that is missing and cannot be
had again counts as "all blocks are gone": what the engine has is learned anew from there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import zmq

from kvtier_vllm.kv_events import MAX_BATCH_BYTES, Cleared, Event, Malformed, decode

MAX_WAITING_MESSAGES: Final = 1000
"""Messages that wait in the subscription; vLLM drops more, which is a gap."""
MAX_ROUND_MESSAGES: Final = 256
"""Taken in one call of `receive`."""
MAX_REPLAYED_MESSAGES: Final = 10_000
MAX_REPLAYED_BYTES: Final = 64 << 20
"""Of one answer; what exceeds them counts as missed."""
REPLAY_TIMEOUT_S: Final = 1.0
"""vLLM looks for such questions ten times a second."""
REPLAY_PAUSE_S: Final = 10.0
"""After a question without an answer the next gap is not asked for so long."""
REOPEN_PAUSE_S: Final = 1.0
"""A connection that ended is made anew so often: after a message beyond the bound ZeroMQ itself does not."""
END_OF_REPLAY: Final = (2**64 - 1).to_bytes(8, "big")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where this engine publishes its events, as a subscriber on the same machine reaches it.

    Attributes
    ----------
    replay
        Where missed batches can be asked for; empty where vLLM was not told to keep any.
    rank
        Data parallel index of the engine.
    """

    events: str
    topic: str
    replay: str
    rank: int


def endpoints_of(vllm_config: Any) -> Endpoints | str | None:
    """Where this engine's events are; None where it publishes none, a text where they are out of reach."""
    config = getattr(vllm_config, "kv_events_config", None)
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return None
    from vllm.distributed.kv_events import ZmqEventPublisher

    rank = vllm_config.parallel_config.data_parallel_index
    endpoint = ZmqEventPublisher.offset_endpoint_port(config.endpoint, rank)
    events = reachable(endpoint)
    if not events:
        return (
            f"kv_events_config.endpoint is {config.endpoint!r}: followed are 'ipc://PATH', 'inproc://NAME' "
            "and 'tcp://*:PORT' (to other addresses vLLM connects, and only who listens there hears it)"
        )
    replay = ZmqEventPublisher.offset_endpoint_port(config.replay_endpoint, rank)
    return Endpoints(events, config.topic, reachable(replay, always_binds=True) if replay else "", rank)


def reachable(endpoint: str, *, always_binds: bool = False) -> str:
    """The address to connect to; empty where vLLM does not listen there, or its port is not known."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return endpoint
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdigit() or not 0 < int(port) < 65_536:
        return ""
    if host == "*":
        return f"tcp://127.0.0.1:{port}"
    if host in ("[::]", "::"):
        return f"tcp://[::1]:{port}"
    return endpoint if always_binds or "::" in host else ""


class EventSource:
    """Used from one thread, which also makes it and closes it.

    Attributes
    ----------
    gaps, damaged
        Times that batches were missing for good, and that one was none.
    replayed
        Batches that were missed and had again.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self.gaps = 0
        self.damaged = 0
        self.replayed = 0
        self._endpoints = endpoints
        self._last = -1
        self._replayed_to = -1
        self._replay_from_s = 0.0
        self._context: Any = zmq.Context.instance()  # the engine's own: inproc addresses lead nowhere else
        self._opened_s = 0.0
        self._open()

    def _open(self) -> None:
        self._opened_s = time.monotonic()
        self._socket = self._make(zmq.SUB, self._endpoints.events, MAX_WAITING_MESSAGES)
        self._socket.setsockopt(zmq.SUBSCRIBE, self._endpoints.topic.encode())
        self._cuts = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def _make(self, kind: int, address: str, max_messages: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, max_messages)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.connect(address)
        return socket

    def receive(self, timeout_s: float) -> list[Event]:
        """The next events, none after `timeout_s`."""
        events: list[Event] = []
        if not self._socket.poll(round(timeout_s * 1000)):
            if self._cuts.poll(0) and time.monotonic() >= self._opened_s + REOPEN_PAUSE_S:
                self.close()
                self._open()  # what is missed meanwhile is seen by the numbers
            return events
        for _ in range(MAX_ROUND_MESSAGES):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            events += self._message(frames)
        return events

    def close(self) -> None:
        """End the subscription."""
        self._socket.disable_monitor()
        self._socket.close()

    # ---- details

    def _message(self, frames: list[bytes]) -> list[Event]:
        if len(frames) != 3 or len(frames[1]) != 8:
            return self._anew(self._last, damaged=True)
        if frames[0] != self._endpoints.topic.encode():
            return []  # a longer topic, of another publisher
        number = int.from_bytes(frames[1], "big")
        if number <= self._replayed_to:
            return []  # it waited here while it was replayed
        missed: list[Event] = []
        if number != self._last + 1:
            missed = self._missed(number)
            if number <= self._last:
                return missed
        return [*missed, *self._batch(number, frames[2])]

    def _batch(self, number: int, payload: bytes) -> list[Event]:
        try:
            events = decode(payload, self._endpoints.rank)
        except Malformed:
            return self._anew(number, damaged=True)
        self._last = number
        return events

    def _anew(self, number: int, *, damaged: bool = False) -> list[Event]:
        """Nothing is known any more of what was until batch `number`."""
        self.damaged += damaged
        self.gaps += not damaged
        self._last, self._replayed_to = number, -1
        return [Cleared()]

    def _missed(self, number: int) -> list[Event]:
        """What came between the last batch and this one, with it if it was kept too; or all begins anew."""
        if number <= self._last:
            return self._anew(number - 1)  # another publisher
        kept = self._replay(self._last + 1) if self._endpoints.replay else []
        events: list[Event] = []
        for its, payload in kept:
            if its <= self._last:
                continue
            if its != self._last + 1:
                events = self._anew(its - 1)  # what lies before is not kept any more
            events += self._batch(its, payload)
            self.replayed += 1
        if self._last < number - 1:
            return self._anew(number - 1)
        self._replayed_to = self._last
        return events

    def _replay(self, first: int) -> list[tuple[int, bytes]]:
        """The batches from `first` on that vLLM has kept; none where it does not answer."""
        end_s = time.monotonic() + REPLAY_TIMEOUT_S
        if end_s < self._replay_from_s:
            return []
        kept: list[tuple[int, bytes]] = []
        room_bytes = MAX_REPLAYED_BYTES
        socket = self._make(zmq.DEALER, self._endpoints.replay, MAX_REPLAYED_MESSAGES)
        try:
            socket.send_multipart((b"", first.to_bytes(8, "big")), zmq.NOBLOCK)
            while len(kept) < MAX_REPLAYED_MESSAGES and room_bytes > 0:
                if not socket.poll(max(0, round((end_s - time.monotonic()) * 1000))):
                    break
                frames = socket.recv_multipart(zmq.NOBLOCK)
                if len(frames) != 4 or len(frames[2]) != 8:
                    break
                if frames[2] == END_OF_REPLAY:
                    return kept
                kept.append((int.from_bytes(frames[2], "big"), frames[3]))
                room_bytes -= len(frames[3])
        except zmq.ZMQError:
            pass  # as without an answer
        finally:
            socket.close()
        self._replay_from_s = time.monotonic() + REPLAY_PAUSE_S + REPLAY_TIMEOUT_S
        return kept
