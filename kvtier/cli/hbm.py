"""What `kvtier check` says of device memory: whether a slab can be had, filled, and exported to engines.

Runs in the probe's own process: CUDA may crash, hang or write to the terminal.
"""

from __future__ import annotations

import importlib
from typing import Final

from kvtier.cli.findings import DEGRADED, MISSING, OK, Finding, finding, one_line
from kvtier.errors import KvtierError
from kvtier.tiers import device as devices

PROBE_BYTES: Final = 4 << 20
_WITHOUT: Final = "no HBM tier; blocks lie in host memory"


def hbm_finding(device: str = "cuda:0", wanted_bytes: int = 0) -> Finding:
    """One line; a small slab is really made, written, read back and given back, so much only looked for."""
    if why := devices.why_not(device):
        todo = (
            "on a GPU machine install the NVIDIA driver, torch with CUDA and kvtier[gpu]; without a GPU "
            "nothing is to be done"
        )
        return finding("hbm", MISSING, f"{one_line(why)}: {_WITHOUT}", todo)
    try:
        handle = _try(device)
        free = devices.free_bytes(device)
    except KvtierError as error:
        todo = "look at nvidia-smi: memory, processes, MIG; CUDA IPC needs no other setting on bare metal"
        return finding("hbm", DEGRADED, f"{device}: {one_line(error)}: {_WITHOUT}", todo)
    if free < wanted_bytes:
        why = f"{device}: {free} bytes are free, hbm_bytes is {wanted_bytes}"
        return finding("hbm", DEGRADED, why, "set KVTIER_HBM_BYTES to less, or KVTIER_HBM_DEVICE to another")
    return finding(
        "hbm", OK, f"{device}: memory is taken, written, read and exported ({handle} bytes of handle)"
    )


def _try(device: str) -> int:
    slab = devices.allocate(device, PROBE_BYTES)
    try:
        sent, back = bytes(range(256)) * (PROBE_BYTES // 256), bytearray(PROBE_BYTES)
        slab.copy_in([(0, memoryview(sent))])
        slab.copy_out([(0, memoryview(back))])
        if back != sent:
            raise KvtierError("what was copied in did not come out: do not use this device")
        return len(slab.handle())
    finally:
        slab.close()


def gds_mode_finding() -> Finding:
    """What cuFile, opened by the binding that kvtier uses, says of itself."""
    from kvtier.tiers import cufile

    name = "gds mode"
    if why := cufile.why_not():
        return finding(name, MISSING, f"{one_line(why)}: reads go through host memory", "see the lines above")
    try:
        found = cufile.properties()
    except Exception as error:  # whatever the binding raises
        return finding(name, DEGRADED, one_line(error), "run gdscheck -p, and look at cufile.log")
    version = importlib.import_module("cuda.bindings.cufile").get_version()
    supported = [
        word
        for word, has in (
            ("NVMe", found.supports_nvme),
            ("NVMe-oF", found.supports_nvmeof),
            ("NVMe P2PDMA", found.supports_p2p),
        )
        if has
    ]
    why = (
        f"{found.mode}: cuFile {version}, nvidia-fs {'.'.join(map(str, found.nvfs))}, "
        f"{', '.join(supported) or 'no storage'} directly, {found.max_batch} operations a batch"
    )
    if found.mode == "direct":
        return finding(name, OK, why)
    return finding(
        name,
        DEGRADED,
        f"{why}: cuFile copies through host memory",
        "install nvidia-fs (package nvidia-gds) and run modprobe nvidia-fs",
    )
