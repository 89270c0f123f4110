from __future__ import annotations

import inspect
import json

import pytest

from kvtier import errors
from kvtier.cli import output

EXPECTED = {
    errors.KvtierError: 6,
    errors.ConfigError: 2,
    errors.InvalidRequest: 2,
    errors.UnknownId: 6,
    errors.Conflict: 6,
    errors.ProtocolMismatch: 6,
    errors.LimitExceeded: 2,
    errors.ResourceShortage: 4,
    errors.AlreadyRunning: 5,
    errors.Unavailable: 3,
    errors.DeadlineExceeded: 3,
    errors.Corruption: 6,
    errors.TierFault: 6,
    errors.IndexFault: 3,
    errors.Fenced: 5,
    errors.TransferFault: 6,
}


def test_every_error_has_its_exit_code() -> None:
    tree = {kind for _, kind in inspect.getmembers(errors, inspect.isclass)}
    assert tree == set(EXPECTED)
    for kind, code in EXPECTED.items():
        assert output.exit_code(kind("x")) == code


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (737280, "720 KiB"),
        ((1 << 30) - 1, "1024 MiB"),
        (5 << 28, "1.25 GiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert output.size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.25, "0.25 s"), (59.9, "59.9 s"), (60, "1 min 0 s"), (725, "12 min 5 s"), (273_700, "3 d 4 h")],
)
def test_durations(duration_s: float, text: str) -> None:
    assert output.duration_text(duration_s) == text


def test_json_is_one_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"a": [1, 2]})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": [1, 2]}
    assert err == ""


def test_progress_and_errors_stay_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    progress = output.Progress()
    with progress.shown():
        progress("step [one]")
    output.print_error("what to do")
    out, err = capsys.readouterr()
    assert out == ""
    assert "step [one]" in err
    assert "kvtier: what to do" in err


def test_tables_keep_brackets_and_cut_nothing_off(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table("t [x]", ["a", "b"], [["[red]plain[/]", "y" * 300]])
    out = capsys.readouterr().out
    assert "[red]plain[/]" in out
    assert "t [x]" in out
    assert out.count("y") == 300
