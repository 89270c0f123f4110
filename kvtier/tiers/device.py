"""Device memory behind one interface: a slab that a node owns, batched copies, and a handle for engines.

Two kinds: ``cuda:N``, in `device_cuda.py`, which is imported only where it is asked for, and ``cpu``, shared
memory that stands for it where there is no GPU. All that lies above (the HBM tier, GPUDirect Storage, the
export to other processes) is the same code for both.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np

from kvtier import machine
from kvtier.errors import ConfigError, TierFault, Unavailable

MAX_HANDLE_BYTES: Final = 4096
_DEVICE: Final = re.compile(r"cpu|cuda:(\d{1,3})")

Copy = tuple[int, memoryview]
"""An offset in the slab, and as many bytes of this process's memory as are copied."""


class Slab(ABC):
    """A piece of device memory; `copy_in`, `copy_out` and `zero` are thread-safe and return when done.

    Attributes
    ----------
    device
        ``cpu`` or ``cuda:N``.
    size_bytes
        Whole pages.
    address
        Where it begins: a device pointer for ``cuda``.
    """

    kind: ClassVar[str]

    def __init__(self, device: str, size_bytes: int, address: int) -> None:
        self.device = device
        self.size_bytes = size_bytes
        self.address = address

    def check(self, offset_bytes: int, size_bytes: int) -> None:
        """Raise `TierFault` unless the range lies in the slab."""
        if not 0 <= offset_bytes <= self.size_bytes - size_bytes or size_bytes < 0:
            raise TierFault(
                f"{size_bytes} bytes at {offset_bytes} are outside the {self.size_bytes} of {self.device}"
            )

    @abstractmethod
    def copy_in(self, copies: Sequence[Copy]) -> None:
        """Memory of this process -> slab; raises `TierFault`, and then nothing is known of these ranges."""

    @abstractmethod
    def copy_out(self, copies: Sequence[Copy]) -> None:
        """Slab -> memory of this process; raises `TierFault`, and then the memory holds anything."""

    @abstractmethod
    def zero(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Write zeros over ranges (offset, size); raises `TierFault`."""

    @abstractmethod
    def tensor(self) -> Any:
        """The slab itself as a torch tensor of bytes, on its device; imports torch."""

    @abstractmethod
    def handle(self) -> bytes:
        """What `import_slab` needs in another process of this user on this machine."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back, or unmap what was imported; idempotent. No copy may run."""


def check_device(device: str) -> str:
    """The name of a device, or `ConfigError`."""
    if _DEVICE.fullmatch(device) is None:
        raise ConfigError(f"hbm_device is {device!r}: allowed is 'cuda:0', another number, or 'cpu'")
    return device


def why_not(device: str) -> str:
    """Why this device cannot be used here, in one line; empty: it can."""
    if check_device(device) == "cpu":
        return ""
    from kvtier.tiers import device_cuda

    return device_cuda.why_not(int(device.partition(":")[2]))


def free_bytes(device: str) -> int:
    """Bytes of a device that can be used here which could be taken now."""
    if check_device(device) == "cpu":
        return machine.memory_available_bytes()
    import torch

    free, _ = torch.cuda.mem_get_info(int(device.partition(":")[2]))
    return int(free)


def allocate(device: str, size_bytes: int) -> Slab:
    """A slab of zeros.

    Raises
    ------
    Unavailable
        The device is not here, or has not so much memory left; says which.
    """
    if check_device(device) == "cpu":
        return CpuSlab.allocate(size_bytes)
    from kvtier.tiers import device_cuda

    return device_cuda.CudaSlab.allocate(int(device.partition(":")[2]), size_bytes)


def import_slab(handle: bytes) -> Slab:
    """Map another process's slab; whoever does keeps to the leases that its owner grants.

    Raises
    ------
    Unavailable
        The handle is none, its owner is gone, or the device cannot be used here.
    """
    try:
        fields: Any = json.loads(handle) if len(handle) <= MAX_HANDLE_BYTES else None
        kind, size_bytes = str(fields["kind"]), int(fields["size_bytes"])
        if kind == CpuSlab.kind:
            return CpuSlab.map(int(fields["pid"]), int(fields["fd"]), int(fields["inode"]), size_bytes)
        if kind == "cuda":
            from kvtier.tiers import device_cuda

            return device_cuda.CudaSlab.map(str(fields["uuid"]), bytes.fromhex(fields["ipc"]), size_bytes)
    except (ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"this is no handle of device memory ({error!r}): register again") from error
    raise Unavailable(f"device memory of kind {kind!r} is not known here: install the same kvtier version")


class CpuSlab(Slab):
    """Anonymous shared memory: it ends with the last process that has it, however that ends."""

    kind = "cpu"

    def __init__(self, fd: int, mapping: mmap.mmap, size_bytes: int) -> None:
        self._fd = fd
        self._mapping = mapping
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._lock = threading.Lock()
        super().__init__("cpu", size_bytes, int(self._bytes.ctypes.data))

    @classmethod
    def allocate(cls, size_bytes: int) -> CpuSlab:
        """See `allocate`."""
        available = machine.memory_available_bytes()
        if size_bytes > available:  # the kernel would go on until it kills somebody
            raise Unavailable(f"only {available} bytes of memory are available")
        fd = os.memfd_create("kvtier-slab", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size_bytes)  # ENOMEM here instead of SIGBUS at first use
            return cls(fd, mmap.mmap(fd, size_bytes), size_bytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise Unavailable(f"{size_bytes} bytes of shared memory cannot be had: {error}") from error

    @classmethod
    def map(cls, pid: int, fd: int, inode: int, size_bytes: int) -> CpuSlab:
        """See `import_slab`."""
        try:
            own = os.open(f"/proc/{pid:d}/fd/{fd:d}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"the owner of this slab is gone ({error.strerror}): register again") from error
        status = os.fstat(own)
        if status.st_ino != inode or status.st_size != size_bytes:
            os.close(own)
            raise Unavailable("the owner of this slab is gone: register again")
        try:
            return cls(own, mmap.mmap(own, size_bytes), size_bytes)
        except (OSError, ValueError) as error:
            os.close(own)
            raise Unavailable(f"the slab cannot be mapped ({error})") from error

    def copy_in(self, copies: Sequence[Copy]) -> None:
        """See `Slab`."""
        for at, memory in copies:
            self.check(at, memory.nbytes)
        with self._lock:
            for at, memory in copies:  # numpy gives up the GIL
                np.copyto(self._live[at : at + memory.nbytes], np.frombuffer(memory, np.uint8))

    def copy_out(self, copies: Sequence[Copy]) -> None:
        """See `Slab`."""
        for at, memory in copies:
            self.check(at, memory.nbytes)
        with self._lock:
            for at, memory in copies:
                np.copyto(np.frombuffer(memory, np.uint8), self._live[at : at + memory.nbytes])

    def zero(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Slab`."""
        for at, size_bytes in ranges:
            self.check(at, size_bytes)
            self._live[at : at + size_bytes] = 0

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """The memory itself, writable; for what reads files straight into it."""
        self.check(offset_bytes, size_bytes)
        return self._live.data[offset_bytes : offset_bytes + size_bytes]

    def tensor(self) -> Any:
        """See `Slab`."""
        import torch

        return torch.from_numpy(self._live)

    def handle(self) -> bytes:
        """See `Slab`: a file descriptor of this process, opened by way of /proc."""
        fields = {
            "kind": self.kind,
            "pid": os.getpid(),
            "fd": self._fd,
            "inode": os.fstat(self._fd).st_ino,
            "size_bytes": self.size_bytes,
        }
        return json.dumps(fields).encode()

    @property
    def _live(self) -> np.ndarray:
        if self._fd < 0:
            raise TierFault("the slab is closed")
        return self._bytes

    def close(self) -> None:
        """See `Slab`. A view that is still in use keeps the memory mapped until its end."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            self._bytes = np.zeros(0, np.uint8)
            try:
                self._mapping.close()
            except BufferError:  # a view or tensor of it lives: unmapped with the last one
                return
