"""cuFile, by NVIDIA's own binding (`cuda.bindings.cufile`): `gds.py` moves the bytes of a CUDA slab with it.

Imported only where a CUDA slab is to be read or written directly. Everything here needs libcuda, also in
cuFile's compatibility mode; where it is missing `why_not` says so in one line.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from kvtier import logs
from kvtier.errors import Unavailable
from kvtier.tiers.device import Slab
from kvtier.tiers.gds import Op

DEFAULT_BATCH: Final = 128
"""Operations of one batch where the driver does not say."""
BATCH_TIMEOUT_S: Final = 1
"""A batch is asked so often whether it has ended; it is waited for until it has."""
_INSTALL: Final = "pip install 'kvtier[gpu]'"

_log = logs.get("gds")


class _NvfsProps(ctypes.Structure):
    _fields_ = (
        ("major_version", ctypes.c_uint),
        ("minor_version", ctypes.c_uint),
        ("poll_threshold_kib", ctypes.c_size_t),
        ("max_direct_io_kib", ctypes.c_size_t),
        ("status_flags", ctypes.c_uint),
        ("control_flags", ctypes.c_uint),
    )


class _DriverProps(ctypes.Structure):
    """CUfileDrvProps_t of cufile.h; room behind it for fields of later versions."""

    _fields_ = (
        ("nvfs", _NvfsProps),
        ("feature_flags", ctypes.c_uint),
        ("max_device_cache_kib", ctypes.c_uint),
        ("per_buffer_cache_kib", ctypes.c_uint),
        ("max_pinned_kib", ctypes.c_uint),
        ("max_batch", ctypes.c_uint),
        ("batch_timeout_ms", ctypes.c_uint),
        ("later", ctypes.c_byte * 256),
    )


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


@dataclass(frozen=True, slots=True)
class Properties:
    """What the opened driver says of itself.

    Attributes
    ----------
    nvfs
        Version of the kernel module nvidia-fs; (0, 0): it is not loaded.
    supports_nvme, supports_nvmeof, supports_p2p
        Which storage is reached directly.
    """

    nvfs: tuple[int, int]
    supports_nvme: bool
    supports_nvmeof: bool
    supports_p2p: bool
    max_batch: int
    max_direct_io_bytes: int
    max_pinned_bytes: int

    @property
    def mode(self) -> str:
        """``direct`` where some storage is, else ``compatibility``: cuFile copies through host memory."""
        direct = self.supports_p2p or (self.nvfs > (0, 0) and (self.supports_nvme or self.supports_nvmeof))
        return "direct" if direct else "compatibility"


def properties_of(cufile: Any) -> Properties:
    """What the driver, which is open, says."""
    raw = _DriverProps()
    cufile.driver_get_properties(ctypes.addressof(raw))

    def supports(name: str) -> bool:
        bit = getattr(cufile.DriverStatusFlags, f"{name}_SUPPORTED", None)  # older ones do not know P2P
        return bit is not None and bool(raw.nvfs.status_flags >> int(bit) & 1)

    return Properties(
        (raw.nvfs.major_version, raw.nvfs.minor_version),
        supports("NVME"),
        supports("NVMEOF"),
        supports("NVME_P2P"),
        raw.max_batch or DEFAULT_BATCH,
        raw.nvfs.max_direct_io_kib << 10,
        raw.max_pinned_kib << 10,
    )


def properties() -> Properties:
    """Opens the driver and asks it; only where `why_not` says nothing."""
    cufile = importlib.import_module("cuda.bindings.cufile")
    cufile.driver_open()
    try:
        return properties_of(cufile)
    finally:
        cufile.driver_close()


def why_not() -> str:
    """Why cuFile cannot be used here, in one line; empty: it opens."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no CUDA driver ({error}): cuFile needs it, also in compatibility mode"
    try:
        cufile = importlib.import_module("cuda.bindings.cufile")
    except Exception as error:  # what it does without its libraries is its own affair
        return f"cuda.bindings.cufile cannot be imported ({' '.join(str(error).split())}): {_INSTALL}"
    try:
        cufile.driver_open()
    except Exception as error:
        return f"the cuFile driver does not open ({' '.join(str(error).split())})"
    cufile.driver_close()
    return ""


class CuFileMover:
    """See `kvtier.tiers.gds.Mover`: the slab is registered once, operations go in batches.

    Raises
    ------
    Unavailable
        See `why_not`; or the slab cannot be registered.
    """

    def __init__(self, slab: Slab) -> None:
        if why := why_not():
            raise Unavailable(why)
        self._cufile: Any = importlib.import_module("cuda.bindings.cufile")
        self._slab = slab
        self._handles: dict[int, int] = {}
        self._is_open = True
        self._cufile.driver_open()
        try:
            self.properties = properties_of(self._cufile)
            self._cufile.buf_register(slab.address, slab.size_bytes, 0)
        except Exception as error:
            self._cufile.driver_close()
            raise Unavailable(f"cuFile does not take the slab: {error}") from error
        self.mode = self.properties.mode

    def add_file(self, fd: int) -> None:
        """See `Mover`; cuFile refuses file systems that it does not know."""
        descriptor = self._cufile.Descr()
        descriptor.type = self._cufile.FileHandleType.OPAQUE_FD
        descriptor.handle.fd = fd
        descriptor.fs_ops = 0
        try:
            self._handles[fd] = self._cufile.handle_register(descriptor.ptr)
        except Exception as error:
            raise Unavailable(f"cuFile does not take the file: {error}") from error

    def move(self, ops: Sequence[Op], *, writing: bool) -> list[bool]:
        """See `Mover`."""
        import torch

        done: list[bool] = []
        with torch.cuda.device(self._slab.device):
            for first in range(0, len(ops), self.properties.max_batch):
                done += self._batch(ops[first : first + self.properties.max_batch], writing)
        return done

    def _batch(self, ops: Sequence[Op], writing: bool) -> list[bool]:
        cufile, count = self._cufile, len(ops)
        try:
            batch = cufile.batch_io_set_up(count)
        except Exception as error:
            raise Unavailable(f"cuFile makes no batch: {error}") from error
        try:
            params = cufile.IOParams(count)
            for i, op in enumerate(ops):
                params[i].mode = cufile.BatchMode.BATCH
                params[i].fh = self._handles[op.fd]
                params[i].opcode = cufile.Opcode.WRITE if writing else cufile.Opcode.READ
                params[i].cookie = i
                params[i].u.batch.dev_ptr_base = self._slab.address
                params[i].u.batch.file_offset = op.offset_bytes
                params[i].u.batch.dev_ptr_offset = op.slab_bytes
                params[i].u.batch.size_ = op.size_bytes
            try:
                cufile.batch_io_submit(batch, count, params.ptr, 0)
            except Exception as error:
                raise Unavailable(f"cuFile takes no batch: {error}") from error
            return self._wait(batch, ops)
        finally:
            cufile.batch_io_destroy(batch)

    def _wait(self, batch: int, ops: Sequence[Op]) -> list[bool]:
        """Until every operation has ended in some way: until then the slab is being moved to."""
        cufile, count = self._cufile, len(ops)
        going = (int(cufile.Status.WAITING), int(cufile.Status.PENDING))
        done = [False] * count
        ended: set[int] = set()
        timeout = _Timespec(BATCH_TIMEOUT_S, 0)
        while len(ended) < count:
            events = cufile.IOEvents(count)
            told = ctypes.c_uint(count)
            try:
                cufile.batch_io_get_status(
                    batch, 1, ctypes.addressof(told), events.ptr, ctypes.addressof(timeout)
                )
            except Exception as error:
                with suppress(Exception):
                    cufile.batch_io_cancel(batch)
                raise Unavailable(f"cuFile does not say what became of a batch: {error}") from error
            for i in range(told.value):
                at, status = int(events[i].cookie), int(events[i].status)
                if status in going:
                    continue
                ended.add(at)
                whole = status == int(cufile.Status.COMPLETE) and int(events[i].ret) == ops[at].size_bytes
                done[at] = whole
        return done

    def close(self) -> None:
        """See `Mover`."""
        if not self._is_open:
            return
        self._is_open = False
        for handle in self._handles.values():
            with suppress(Exception):
                self._cufile.handle_deregister(handle)
        self._handles.clear()
        with suppress(Exception):
            self._cufile.buf_deregister(self._slab.address)
        with suppress(Exception):
            self._cufile.driver_close()
