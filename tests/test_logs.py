"""Logs go where they should, in the form they should have, without what must not be in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvtier import logs

KEY = b"\x01\x02secret-key-bytes\x03"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    structlog.reset_defaults()
    logging.root.handlers[:], logging.root.level = handlers, level


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_keys_salts_and_tokens_stay_out(log_format: str) -> None:
    stream = io.StringIO()
    logs.configure("info", log_format, stream)
    log = logs.get("test")
    log.info(
        "one", key="named-key", keys=[KEY], salt="named-salt", tokens=[987654321], call_id="named-id", count=3
    )
    log.info("two", content=KEY, view=memoryview(KEY), engine="engine-1")

    def fails() -> None:
        local_secret = KEY  # noqa: F841
        raise ValueError("what went wrong")

    try:
        fails()
    except ValueError:
        log.exception("three")
    text = stream.getvalue()
    for secret in ("secret-key-bytes", "named-", "987654321", "local_secret ="):
        assert secret not in text.replace("local_secret = KEY", "")
    for shown in ("one", "count", "engine-1", f"<{len(KEY)} bytes>", "what went wrong", "fails"):
        assert shown in text


def test_json_is_one_object_a_line() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    logs.get("part").warning("event", count=1)
    logging.getLogger("kvtier.tiers.arena").warning("took %d bytes", 5)
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["part"], first["level"], first["count"]) == ("event", "part", "warning", 1)
    assert (second["event"], second["level"]) == ("took 5 bytes", "warning")
    assert second["logger"] == "kvtier.tiers.arena"


def test_levels() -> None:
    stream = io.StringIO()
    logs.configure("warning", "json", stream)
    logs.get("part").info("not this")
    logging.getLogger("library").info("nor this")
    logs.get("part").error("this")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["this"]


def test_nothing_reaches_stdout_before_it_is_configured(capsys: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()
    logs.get("part").warning("early")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "early" in captured.err


def test_auto_is_json_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    logs.configure("info", "auto", stream)
    logs.get("part").info("event")
    assert json.loads(stream.getvalue())["event"] == "event"
