"""kvtier: a distributed KV-cache tiering service for LLM inference."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvtier")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"
