"""What the scheduler side and the worker side of the connector say to each other.

Scheduler to worker, once a step: `StepOrders`. Worker to scheduler, when there is something to say:
`StepReport`. Once at start the worker says `Handshake`: what its blocks look like.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier.types import MAX_REQUEST_ID_CHARS, Key, Layout
from kvtier_vllm.prefill import StepTime


def hold_id(engine_id: str, request_id: str) -> str:
    """The request's name on the node: scheduler and worker, two clients, mean the same hold by it.

    A user may choose any X-Request-Id; one that the node would not take is hashed.
    """
    name = f"{engine_id}/{request_id}"
    if len(name) <= MAX_REQUEST_ID_CHARS and name.isprintable():
        return name
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load `keys` into `block_ids` (same length) within `budget_s` seconds, or report what failed."""

    request_id: str
    keys: tuple[Key, ...]
    block_ids: tuple[int, ...]
    budget_s: float


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save `block_ids` under `keys` (same length), which continue `parent`, once the step is done."""

    job: int
    request_id: str
    parent: Key | None
    keys: tuple[Key, ...]
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """Everything the worker has to do in one step.

    Attributes
    ----------
    epoch
        The version of the weights that the keys of this step stand for; a worker with another one
        fails the loads and drops the saves.
    preempted
        Requests whose blocks are about to be overwritten: end their saves before anything else.
    finishing
        Finished requests whose blocks vLLM retains until `finished_sending` names them, once.
    idle
        The step computes nothing.
    timed_tokens
        All tokens of a step that mostly computes prompts: the worker times it. 0 for any other.
    """

    epoch: int
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    finishing: frozenset[str] = frozenset()
    idle: bool = False
    timed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WeightsState:
    """Version of the weights in the worker; `changed` until somebody names a revision for them."""

    epoch: int = 0
    changed: bool = False
    revision: str = ""
    why: str = ""


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What has ended since the last report.

    Attributes
    ----------
    saved
        Jobs of `SaveOrder` that have ended, whatever their outcome: their source may be reused.
    loaded
        For each load that has ended how many leading blocks are in place.
    weights
        Present for as long as it is not what the scheduler believes.
    computed
        Steps that were timed.
    """

    saved: list[int] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)
    weights: WeightsState | None = None
    computed: list[StepTime] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Never called: engines of more than one worker are refused at start."""
        raise AssertionError("two workers report to one kvtier connector")


@dataclass(frozen=True, slots=True)
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What the worker's blocks look like, derived from its tensors."""

    layout: Layout
    kv_dtype: str
