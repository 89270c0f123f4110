from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvtier_vllm import identity


class _Config(dict[str, Any]):
    def to_dict(self) -> dict[str, Any]:
        return dict(self)


def _vllm_config(model: Path | str, **changes: Any) -> Any:
    hf = _Config(hidden_size=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    hf.update(changes.pop("hf", {}))
    model_config = SimpleNamespace(
        model=str(model),
        model_weights="",
        revision=None,
        hf_config=hf,
        dtype="torch.bfloat16",
        quantization=None,
        max_model_len=1024,
    )
    load = SimpleNamespace(load_format="auto", download_dir=None)
    for name, value in changes.items():
        setattr(load if hasattr(load, name) else model_config, name, value)
    return SimpleNamespace(model_config=model_config, load_config=load)


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    packed = json.dumps(header).encode()
    path.write_bytes(
        struct.pack("<Q", len(packed)) + packed + b"".join(a.tobytes() for a in tensors.values())
    )


def _checkpoint(directory: Path, **changes: np.ndarray) -> Path:
    directory.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    tensors = {f"layer.{i}": rng.random((64, 64), np.float32) for i in range(8)} | changes
    _write_safetensors(directory / "model.safetensors", tensors)
    return directory


def test_a_copy_in_another_place_is_the_same_model(tmp_path: Path) -> None:
    one, two = _checkpoint(tmp_path / "one"), _checkpoint(tmp_path / "two")
    assert identity.weights_identity(_vllm_config(one), "") == identity.weights_identity(
        _vllm_config(two), ""
    )


@pytest.mark.parametrize("layer", range(8))
def test_one_changed_tensor_is_another_model(tmp_path: Path, layer: int) -> None:
    rng = np.random.default_rng(1)
    one = _checkpoint(tmp_path / "one")
    two = _checkpoint(tmp_path / "two", **{f"layer.{layer}": rng.random((64, 64), np.float32)})
    assert identity.weights_identity(_vllm_config(one), "") != identity.weights_identity(
        _vllm_config(two), ""
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"hf": {"hidden_size": 65}},
        {"hf": {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}},
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
    ],
)
def test_config_dtype_and_quantisation_count(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = _checkpoint(tmp_path / "model")
    plain = identity.weights_identity(_vllm_config(path), "")
    assert identity.weights_identity(_vllm_config(path, **changes), "") != plain


@pytest.mark.parametrize(
    ("rope", "counts"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, False),
        ({"rope_type": "llama3", "factor": 8.0}, False),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, True),
    ],
)
def test_the_context_length_counts_where_positions_depend_on_it(
    tmp_path: Path, rope: dict[str, Any], counts: bool
) -> None:
    path = _checkpoint(tmp_path / "model")
    short = identity.weights_identity(_vllm_config(path, hf={"rope_parameters": rope}), "")
    long = identity.weights_identity(_vllm_config(path, hf={"rope_parameters": rope}, max_model_len=4096), "")
    assert (short != long) == counts


def test_names_and_versions_of_libraries_do_not_count(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / "model")
    plain = identity.weights_identity(_vllm_config(path), "")
    changed = _vllm_config(path, hf={"_name_or_path": "elsewhere", "transformers_version": "9"})
    assert identity.weights_identity(changed, "") == plain


def test_a_revision_counts(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / "model")
    seen = {identity.weights_identity(_vllm_config(path), name) for name in ("", "a", "b")}
    assert len(seen) == 3


def test_dummy_weights_share_nothing_unless_they_have_a_revision(tmp_path: Path) -> None:
    config = _vllm_config(_checkpoint(tmp_path / "model"), load_format="dummy")
    assert identity.weights_identity(config, "") != identity.weights_identity(config, "")
    assert identity.weights_identity(config, "a") == identity.weights_identity(config, "a")


def test_a_model_without_files_is_known_by_its_commit_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    known = _vllm_config("nobody/nothing")
    known.model_config.hf_config._commit_hash = "abc"
    assert identity.weights_identity(known, "") == identity.weights_identity(known, "")
    unknown = _vllm_config("nobody/nothing")
    assert identity.weights_identity(unknown, "") != identity.weights_identity(unknown, "")


def test_other_formats_are_sampled(tmp_path: Path) -> None:
    blob = bytearray(np.random.default_rng(2).bytes(1 << 20))
    path = tmp_path / "model.gguf"
    path.write_bytes(blob)
    before = identity.hash_files(path)
    blob[-1] ^= 1
    path.write_bytes(blob)
    assert identity.hash_files(path) != before
    path.write_bytes(blob + b"x")
    assert identity.hash_files(path) != before


def test_a_large_file_costs_a_bounded_number_of_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "big.safetensors"
    count = 50_000
    header = json.dumps(
        {
            f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [i << 20, (i + 1) << 20]}
            for i in range(count)
        }
    ).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (count << 20))
    read_bytes = 0
    pread = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        nonlocal read_bytes
        data = pread(fd, size, offset)
        read_bytes += len(data)
        return data

    monkeypatch.setattr(os, "pread", counting)
    assert identity.hash_files(path) is not None
    assert read_bytes <= len(header) + 8 + (identity.MAX_SAMPLES + 1) * identity.SAMPLE_BYTES


def test_a_broken_header_is_sampled_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"x" * 100)
    before = identity.hash_files(path)
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"y" * 100)
    assert identity.hash_files(path) != before
    path.write_bytes(b"")
    assert identity.hash_files(path) is not None
