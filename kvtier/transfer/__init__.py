"""Bytes between nodes: `nixl` (UCX: RDMA, shared memory, TCP) where it works, `stream` (gRPC) everywhere."""

from __future__ import annotations

from kvtier.transfer.opening import open_transfers

__all__ = ["open_transfers"]
