"""Bytes between nodes: `nixl` (UCX: RDMA, shared memory, TCP) where it works, `stream` (gRPC) everywhere.

Begin with `opening.open_transfers`. `nixl` is in four parts: `nixl.py` on the daemon's loop, `process.py`
that holds the process with the native agent, `agent.py` that runs in it, and `frames.py` that both speak.
"""
