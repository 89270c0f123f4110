from __future__ import annotations

import os
from typing import Any

import pytest
from kvtier_vllm.settings import Settings, default_socket

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.paths import default_run_dir


def test_without_entries_the_daemon_of_the_same_user_is_found() -> None:
    assert Settings.parse({}).socket_path == default_socket() == str(Config().socket)


@pytest.mark.parametrize(
    ("uid", "environ", "expected"),
    [
        (0, {"XDG_RUNTIME_DIR": "/run/user/0"}, "/run/kvtier"),
        (7, {"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/kvtier"),
        (7, {}, "/tmp/kvtier-7"),
        (7, {"XDG_RUNTIME_DIR": ""}, "/tmp/kvtier-7"),
    ],
)
def test_default_run_dir(uid: int, environ: dict[str, str], expected: str) -> None:
    assert str(default_run_dir(uid, environ)) == expected


def test_entries_are_taken_and_whole_numbers_pass_for_seconds() -> None:
    settings = Settings.parse({"socket": "/s", "tenant": "a", "lookup_timeout_s": 1, "min_load_blocks": 3})
    assert (settings.socket_path, settings.tenant) == ("/s", "a")
    assert isinstance(settings.lookup_timeout_s, float)
    assert settings.min_load_blocks == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sokcet", "/s"),
        ("socket", "relative"),
        ("socket", 1),
        ("tenant", None),
        ("verify_loads", "maybe"),
        ("lookup_timeout_s", 0),
        ("lookup_timeout_s", float("nan")),
        ("lookup_timeout_s", float("inf")),
        ("lookup_timeout_s", True),
        ("save_fraction", 1.5),
        ("save_fraction", 0),
        ("lookup_threads", 0),
        ("lookup_threads", 2.0),
        ("min_load_blocks", -1),
    ],
)
def test_bad_entries_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"kv_connector_extra_config\.{name}.*allowed"):
        Settings.parse({name: value})


def test_the_environment_is_no_source_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Settings.parse({})
    for name in ("SOCKET", "TENANT", "REVISION", "RUN_DIR"):
        monkeypatch.setitem(os.environ, f"KVTIER_{name}", "/elsewhere")
    assert Settings.parse({}) == before
    assert Settings.parse({}).socket_path == default_socket()
