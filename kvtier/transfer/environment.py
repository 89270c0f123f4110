"""How UCX is set up in an agent's process. What the operator has set in the environment always wins."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # agents' processes load this and do without the rest
    from kvtier.config import Config

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


def why_no_nixl(config: Config) -> str:
    """Why a node does without NIXL whatever the machine has, or nothing: whoever asks for certificates does
    not get a transfer that knows none, unless it is named.
    """
    if config.transfer == "nixl" or config.tls_cert_file is None or is_loopback(config.peer_host):
        return ""
    return (
        "peers are asked for certificates, but NIXL neither encrypts nor authenticates what it sends: "
        "set transfer to 'nixl' where the network itself is trusted"
    )


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
