"""Eviction policies: each implements `kvtier.interfaces.Policy`, and has a line in `registry`."""

from kvtier.core.policies.lru import LruPolicy
from kvtier.core.policies.registry import POLICIES
from kvtier.core.policies.s3fifo import S3FifoPolicy
from kvtier.core.policies.worth import WorthPolicy

__all__ = ["POLICIES", "LruPolicy", "S3FifoPolicy", "WorthPolicy"]
