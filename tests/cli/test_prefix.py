from __future__ import annotations

import io
from pathlib import Path

import pytest

from kvtier.cli.prefix import read_keys
from kvtier.errors import InvalidRequest

ONE, TWO = "11" * 32, "AB" * 32


def test_keys_as_arguments() -> None:
    assert read_keys([ONE, TWO], None) == [b"\x11" * 32, b"\xab" * 32]


def test_keys_from_a_file_and_from_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{ONE}\n\n  {TWO}\n")
    assert read_keys(None, path) == [b"\x11" * 32, b"\xab" * 32]
    monkeypatch.setattr("sys.stdin", io.StringIO(TWO))
    assert read_keys([], Path("-")) == [b"\xab" * 32]


@pytest.mark.parametrize(
    "text", ["", "11", ONE + "1", ONE + "11", "zz" * 32, "1" * 63, " ".join(["11"] * 32)]
)
def test_what_is_no_key_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest, match="key 2 is not 64 hex digits"):
        read_keys([ONE, text], None)


def test_one_source_and_not_none_or_two(tmp_path: Path) -> None:
    for keys, file in (([], None), (None, None), ([ONE], tmp_path)):
        with pytest.raises(InvalidRequest, match="one of both"):
            read_keys(keys, file)


def test_files_that_hold_no_keys(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_keys(None, tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_keys(None, tmp_path / "binary")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidRequest, match="holds no keys"):
        read_keys(None, tmp_path / "empty")
