"""Eviction policies: each implements `kvtier.interfaces.Policy`."""

from kvtier.core.policies.lru import LruPolicy

__all__ = ["LruPolicy"]
