"""All policies, by the names that the configuration knows: one line for a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvtier.core.policies.lru import LruPolicy
from kvtier.core.policies.s3fifo import S3FifoPolicy
from kvtier.core.policies.worth import WorthPolicy
from kvtier.interfaces import Policy

POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "lru": LruPolicy,
    "s3fifo": S3FifoPolicy,
    "worth": WorthPolicy,
}
