"""Device memory of CUDA: allocated by CUDA's runtime, copied by torch, exported by CUDA IPC.

Imported only where a ``cuda`` device is asked for. The slab is not torch's own memory: its caching allocator
cuts pieces out of larger ones, and an IPC handle would name the whole. Torch sees it through
`__cuda_array_interface__`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from kvtier.errors import TierFault, Unavailable
from kvtier.tiers.device import Copy, Slab

IPC_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_INSTALL: Final = "pip install 'kvtier[gpu]'"


def why_not(index: int) -> str:
    """Why this device cannot be used here, in one line; empty: it can."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no CUDA driver ({error})"
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if index >= torch.cuda.device_count():
        return f"there is no cuda:{index}, only {torch.cuda.device_count()} devices"
    try:
        importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        return f"cuda.bindings cannot be imported ({error}): {_INSTALL}"
    return ""


class CudaSlab(Slab):
    """Memory of one device, this process's own or another's."""

    kind = "cuda"

    def __init__(self, index: int, address: int, size_bytes: int, release: Callable[[Any, int], Any]) -> None:
        import torch

        super().__init__(f"cuda:{index}", size_bytes, address)
        self._index = index
        self._release = release
        self._lock = threading.Lock()
        self._is_open = True
        with torch.cuda.device(index):
            self._tensor = torch.as_tensor(_Memory(address, size_bytes), device=f"cuda:{index}")
        self._stream = torch.cuda.Stream(index)
        self._pinned: list[int] = []

    @classmethod
    def allocate(cls, index: int, size_bytes: int) -> CudaSlab:
        """See `kvtier.tiers.device.allocate`."""
        with _using(index) as runtime:
            address = int(_checked(runtime.cudaMalloc(size_bytes), f"{size_bytes} bytes of cuda:{index}"))
            try:
                slab = cls(index, address, size_bytes, lambda runtime, at: runtime.cudaFree(at))
                slab.zero([(0, size_bytes)])
            except BaseException:
                runtime.cudaFree(address)
                raise
            return slab

    @classmethod
    def map(cls, uuid: str, ipc: bytes, size_bytes: int) -> CudaSlab:
        """See `kvtier.tiers.device.import_slab`: the device is found by its UUID, since numbers differ."""
        if len(ipc) != IPC_HANDLE_BYTES:
            raise Unavailable(f"an IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(ipc)}: register again")
        if why := why_not(0):
            raise Unavailable(why)
        import torch

        every = range(torch.cuda.device_count())
        index = next((i for i in every if str(torch.cuda.get_device_properties(i).uuid) == uuid), None)
        if index is None:
            raise Unavailable(f"this process does not see the device {uuid} that the slab lies on")
        with _using(index) as runtime:
            handle = runtime.cudaIpcMemHandle_t()
            handle.reserved = ipc
            opened = runtime.cudaIpcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
            address = int(_checked(opened, "mapping the node's slab"))
            return cls(index, address, size_bytes, lambda runtime, at: runtime.cudaIpcCloseMemHandle(at))

    def copy_in(self, copies: Sequence[Copy]) -> None:
        """See `Slab`: all on one stream, one wait at the end."""
        with self._working():
            for at, memory in copies:
                self.check(at, memory.nbytes)
                self._tensor[at : at + memory.nbytes].copy_(_host(memory), non_blocking=True)

    def copy_out(self, copies: Sequence[Copy]) -> None:
        """See `Slab`."""
        with self._working():
            for at, memory in copies:
                self.check(at, memory.nbytes)
                _host(memory).copy_(self._tensor[at : at + memory.nbytes], non_blocking=True)

    def zero(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Slab`."""
        with self._working():
            for at, size_bytes in ranges:
                self.check(at, size_bytes)
                self._tensor[at : at + size_bytes].zero_()

    def pin(self, memory: memoryview) -> bool:
        """Register memory of this process with CUDA until `close`, so that copies run at the bus's speed."""
        import torch

        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        with torch.cuda.device(self._index):
            status = int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0))
        if status == 0:
            self._pinned.append(address)
        return status == 0

    def tensor(self) -> Any:
        """See `Slab`."""
        return self._tensor

    def handle(self) -> bytes:
        """See `Slab`."""
        import torch

        with _using(self._index) as runtime:
            ipc = _checked(runtime.cudaIpcGetMemHandle(self.address), "exporting the slab")
        uuid = str(torch.cuda.get_device_properties(self._index).uuid)
        fields = {"kind": self.kind, "uuid": uuid, "ipc": bytes(ipc.reserved).hex()}
        return json.dumps({**fields, "size_bytes": self.size_bytes}).encode()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Copies on the stream; when this ends none of them runs any more, whatever happened."""
        import torch

        with self._lock:
            if not self._is_open:
                raise TierFault("the slab is closed")
            try:
                with torch.cuda.device(self._index), torch.cuda.stream(self._stream):
                    try:
                        yield
                    finally:
                        self._stream.synchronize()
            except RuntimeError as error:
                raise TierFault(f"a copy on {self.device} failed: {error}") from error

    def close(self) -> None:
        """See `Slab`. Processes that have mapped it must not use it any more: their leases are over."""
        import torch

        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            for address in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(address)
            self._tensor = None
            with _using(self._index) as runtime:
                self._release(runtime, self.address)


class _Memory:
    """Lets torch see device memory at an address; whoever makes one keeps the memory alive."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": (size_bytes,),
            "strides": None,
        }


class _HostMemory:
    """The same of this process's memory: torch warns of read-only buffers, which are only read here."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": (size_bytes,),
        }


def _host(memory: memoryview) -> Any:
    import torch

    address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
    return torch.from_numpy(np.asarray(_HostMemory(address, memory.nbytes)))


@contextmanager
def _using(index: int) -> Iterator[Any]:
    """The runtime's binding, with this device the thread's own meanwhile: the thread may be an engine's.

    Its primary context is torch's, too.
    """
    if why := why_not(index):
        raise Unavailable(why)
    import torch

    runtime = importlib.import_module("cuda.bindings.runtime")
    with torch.cuda.device(index):
        _checked(runtime.cudaSetDevice(index), f"cuda:{index}")
        yield runtime


def _checked(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if int(status):
        raise Unavailable(f"{what}: CUDA says {status.name}")
    return values[0] if values else None
