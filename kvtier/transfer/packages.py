"""Which Python packages NIXL comes in."""

from __future__ import annotations

from importlib import metadata
from typing import Final

PACKAGES: Final = {"nixl_cu12": "nixl-cu12", "nixl_cu13": "nixl-cu13"}
"""Module and distribution, the first that is installed counts."""


def nixl_version() -> str:
    """Of the NIXL that is installed; empty where none is."""
    for distribution in PACKAGES.values():
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""
