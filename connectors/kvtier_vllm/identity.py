"""Which weights an engine runs: 32 bytes, never only a name.

The identity covers the effective config (of the model as vLLM runs it, dtype and quantisation
included), and of every weight file its size, the header of a safetensors file, and samples of its
contents. Reading is bounded (`MAX_SAMPLES` of `SAMPLE_BYTES`), so that a checkpoint of 100 GB costs a
second or two, and every tensor is sampled as long as the bound allows.

Weights that cannot be read from files (dummy ones, streamed ones) get a random identity for the life
of the process: they share nothing, unless the operator vouches for them with `revision`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger("vllm.kvtier")

MAX_SAMPLES: Final = 16_384
SAMPLE_BYTES: Final = 512
MAX_HEADER_BYTES: Final = 256 << 20
_SUFFIXES: Final = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".tensors")
_FILE_FORMATS: Final = (
    "auto",
    "hf",
    "safetensors",
    "pt",
    "npcache",
    "gguf",
    "bitsandbytes",
    "fastsafetensors",
)
"""Values of `load_format` that read the files of the model's directory."""
_NOT_WEIGHTS: Final = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "_attn_implementation"}
)
_KEEPS_LENGTH_OUT: Final = frozenset({None, "default", "linear", "llama3", "mrope"})
"""Rotary embeddings whose values do not depend on the longest context that is served."""


def weights_identity(vllm_config: Any, revision: str) -> bytes:
    """32 bytes for the weights that `vllm_config` loads; `revision` is the operator's own addition."""
    digest = hashlib.sha256(b"kvtier.weights.1")
    _add(digest, "config", _canonical(effective_config(vllm_config.model_config)))
    _add(digest, "revision", revision.encode())
    contents = _contents(vllm_config)
    if contents is None and not revision:
        logger.warning(
            "kvtier: weights of load format %r cannot be identified, so nothing is shared with other "
            "engines or kept over a restart; give them a name with kv_connector_extra_config.revision",
            str(_load_format(vllm_config)),
        )
        contents = os.urandom(32)
    _add(digest, "contents", contents or b"")
    return digest.digest()


def revised_identity(identity: bytes, revision: str) -> bytes:
    """The identity of weights that replaced those of `identity` in place."""
    digest = hashlib.sha256(b"kvtier.weights.revised.1")
    _add(digest, "identity", identity)
    _add(digest, "revision", revision.encode())
    return digest.digest()


def effective_config(model_config: Any) -> dict[str, Any]:
    """What of the model's config decides its KV, as plain data."""
    described = {
        name: value for name, value in _as_dict(model_config.hf_config).items() if name not in _NOT_WEIGHTS
    }
    effective = {
        "hf_config": described,
        "dtype": str(model_config.dtype),
        "quantization": model_config.quantization,
    }
    if _depends_on_length(described):
        effective["max_model_len"] = model_config.max_model_len
    return effective


def _depends_on_length(value: Any) -> bool:
    """Whether anything in a config is a rotary embedding that is scaled by the longest context."""
    if not isinstance(value, Mapping):
        return False
    if any("factor" in str(name) for name in value):
        kind = value.get("rope_type", value.get("type"))
        if kind not in _KEEPS_LENGTH_OUT:
            return True
    return any(_depends_on_length(item) for item in value.values())


def _as_dict(config: Any) -> dict[str, Any]:
    described = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return dict(described)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":")).encode()


def _add(digest: Any, tag: str, value: bytes) -> None:
    digest.update(struct.pack("<I", len(tag)) + tag.encode() + struct.pack("<Q", len(value)) + value)


def _load_format(vllm_config: Any) -> str:
    load_format = vllm_config.load_config.load_format
    return str(getattr(load_format, "value", load_format))


def _contents(vllm_config: Any) -> bytes | None:
    """A hash over the weight files, or over the commit they came with; None where neither is known."""
    model_config = vllm_config.model_config
    if _load_format(vllm_config) not in _FILE_FORMATS or model_config.model_weights:
        return None
    root = _resolve(vllm_config)
    if root is not None:
        return hash_files(root)
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    return f"commit {model_config.model} {commit}".encode() if commit else None


def _resolve(vllm_config: Any) -> Path | None:
    """Where the weight files lie on this machine."""
    model_config = vllm_config.model_config
    path = Path(model_config.model)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                model_config.model,
                revision=model_config.revision,
                cache_dir=vllm_config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except (ImportError, OSError, ValueError):
        return None


def hash_files(root: Path) -> bytes | None:
    """32 bytes over sizes, headers and samples of the weight files at `root`, None where it has none."""
    files = [root] if root.is_file() else weight_files(root)
    if not files:
        return None
    digest = hashlib.sha256()
    per_file = max(1, MAX_SAMPLES // len(files))
    for path in files:
        # A single file is its own name: models are renamed, contents are not.
        _add(digest, "name", b"" if root.is_file() else str(path.relative_to(root)).encode())
        _add_file(digest, path, per_file)
    return digest.digest()


def weight_files(root: Path) -> list[Path]:
    """The weight files of a checkpoint directory: safetensors if there are any, as vLLM prefers them."""
    files = sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    return [path for path in files if path.suffix == ".safetensors"] or files


def _add_file(digest: Any, path: Path, samples: int) -> None:
    with path.open("rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        _add(digest, "size", struct.pack("<Q", size_bytes))
        header = _safetensors_header(file.fileno(), size_bytes) if path.suffix == ".safetensors" else None
        if header is not None:
            _add(digest, "header", header)
        for offset in sample_offsets(header, size_bytes, samples):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))


def _safetensors_header(fd: int, size_bytes: int) -> bytes | None:
    head = os.pread(fd, 8, 0)
    if len(head) < 8:
        return None
    length = struct.unpack("<Q", head)[0]
    if not 0 < length <= min(MAX_HEADER_BYTES, size_bytes - 8):
        return None
    return os.pread(fd, length, 8)


def sample_offsets(header: bytes | None, size_bytes: int, samples: int) -> Iterator[int]:
    """Where to sample a file: at the start, middle and end of every tensor, else evenly spread.

    Fewer tensors than `samples` allows leave the rest to an even spread over the file.
    """
    wanted = sorted(set(_tensor_offsets(header)) if header is not None else ())
    if len(wanted) > samples:
        wanted = [wanted[index * len(wanted) // samples] for index in range(samples)]
    spread = min(samples - len(wanted), 1024)
    step = max(1, size_bytes // spread) if spread else size_bytes
    even: Iterable[int] = range(0, size_bytes, step) if spread else ()
    yield from sorted({*wanted, *even, max(0, size_bytes - SAMPLE_BYTES)})


def _tensor_offsets(header: bytes) -> Iterator[int]:
    try:
        tensors = json.loads(header)
    except ValueError:
        return
    base = 8 + len(header)
    for name, tensor in tensors.items():
        if name == "__metadata__":
            continue
        first, last = tensor["data_offsets"]
        yield base + first
        yield base + (first + last) // 2
        yield base + max(first, last - SAMPLE_BYTES)
