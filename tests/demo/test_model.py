from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.demo import model


def checkpoint(directory: Path) -> Path:
    directory.mkdir()
    manifest = {}
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_text(name)
        manifest[name] = hashlib.sha256(name.encode()).hexdigest()
    (directory / "kvtier-manifest.json").write_text(json.dumps(manifest))
    return directory


def cut(directory: Path) -> None:
    (directory / "model.safetensors").write_text("model")


def lose(directory: Path) -> None:
    (directory / "config.json").unlink()


def no_manifest(directory: Path) -> None:
    (directory / "kvtier-manifest.json").unlink()


def bad_manifest(directory: Path) -> None:
    (directory / "kvtier-manifest.json").write_text("[]")


def empty_manifest(directory: Path) -> None:
    (directory / "kvtier-manifest.json").write_text("{}")


def half_manifest(directory: Path) -> None:
    (directory / "kvtier-manifest.json").write_text('{"config.json": ')


def test_a_whole_checkpoint_is_intact(tmp_path: Path) -> None:
    assert model.is_intact(checkpoint(tmp_path / "model"))


@pytest.mark.parametrize("damage", [cut, lose, no_manifest, bad_manifest, empty_manifest, half_manifest])
def test_a_damaged_checkpoint_is_not(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    directory = checkpoint(tmp_path / "model")
    damage(directory)
    assert not model.is_intact(directory)


def test_an_intact_checkpoint_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = model.cache_directory()
    directory.mkdir(parents=True)
    made = checkpoint(directory / "SmolLM2-135M-Instruct-v1")
    said: list[str] = []
    assert model.prepare(said.append) == made
    assert said == []


def test_the_cache_lies_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.cache_directory() == tmp_path / "kvtier" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert model.cache_directory() == tmp_path / "home" / ".cache" / "kvtier" / "models"
