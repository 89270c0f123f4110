"""How UCX is set up in an agent's process. What the operator has set in the environment always wins."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

INFINIBAND: Final = Path("/sys/class/infiniband")
SEGMENT: Final = "256k"
"""UCX's own TCP segments are several times slower."""
_SIOCGIFADDR: Final = 0x8915


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def agent_environment(peer_host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent's process.

    UCX would listen on every network that there is; it is held to the one of the peer service, so that
    nothing is open off the machine where that is not.
    """
    values = {
        "UCX_TCP_TX_SEG_SIZE": SEGMENT,
        "UCX_TCP_RX_SEG_SIZE": SEGMENT,
        "UCX_LOG_LEVEL": "error",
        "UCX_HANDLE_ERRORS": "none",
        "NIXL_LOG_LEVEL": "ERROR",
    }
    adapters = _infiniband_adapters()
    if not adapters:
        values["UCX_MODULES"] = "^ib"  # of no use, and makes the process crash at exit
    if is_loopback(peer_host):
        values["UCX_NET_DEVICES"] = "lo"
    elif device := _device_of(peer_host):
        values["UCX_NET_DEVICES"] = ",".join([device, *(f"{name}:1" for name in adapters)])
    return values | dict(environ)


def _infiniband_adapters() -> list[str]:
    try:
        return sorted(entry.name for entry in INFINIBAND.iterdir())
    except OSError:
        return []


def _device_of(host: str) -> str:
    """The network device that has this IPv4 address; empty: none in particular."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return ""
