"""URLs and passwords: what is allowed, and what is never shown."""

from __future__ import annotations

import asyncio
import copy
import logging
import traceback
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, IndexFault, KvtierError
from kvtier.index import Credentials, open_index, read_password
from kvtier.index.address import MAX_HOSTS, parse_address, redact
from kvtier.interfaces import Index
from kvtier.testing.index_tests import blocks_of, eventually, record_of
from kvtier.types import TierKind
from tests.index.conftest import MakeConfig
from tests.index.fake import fake_server
from tests.index.servers import Server

SECRET = "s3cr3t-w0rd"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", "single [('h', 6379)] tls=False db=0"),
        ("redis://h:1/7", "single [('h', 1)] tls=False db=7"),
        (" rediss://[::1]:2 ", "single [('::1', 2)] tls=True db=0"),
        (
            "redis+cluster://a:1,b.c-d:2,[fe80::1]:3",
            "cluster [('a', 1), ('b.c-d', 2), ('fe80::1', 3)] tls=False db=0",
        ),
        ("rediss+cluster://a:1/0", "cluster [('a', 1)] tls=True db=0"),
        ("redis+sentinel://a,b:2/m.1", "sentinel [('a', 26379), ('b', 2)] tls=False db=0"),
    ],
)
def test_urls(url: str, expected: str) -> None:
    address = parse_address(url)
    assert f"{address.kind} {list(address.hosts)} tls={address.tls} db={address.database}" == expected
    assert parse_address(str(address)) == address


def test_user_and_password_in_a_url() -> None:
    address = parse_address("redis://us%3Aer:p%40ss%2Fw%3Ard@h:1/2")
    assert (address.user, address.password) == ("us:er", "p@ss/w:rd")
    assert str(address) == "redis://h:1/2"
    assert "p@ss" not in repr(address)
    assert parse_address("redis://:pw@h").password == "pw"
    assert parse_address("redis+cluster://u:a@b@h:1,i:2").hosts == (("h", 1), ("i", 2))


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "h:0",
        "h:65536",
        "h:-1",
        "h:x",
        "h:1:2",
        "h:1/x",
        "h:1/-1",
        "h:1/1/2",
        "h:1?db=3",
        "h:1#f",
        "::1:6379",
        "[zz]:1",
        "h h:1",
        "h\n:1",
        "a:1,b:2",
        "ü:1",
    ],
)
@pytest.mark.parametrize("userinfo", ["", f"user:{SECRET}@"])
def test_what_is_no_url(userinfo: str, rest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(f"redis://{userinfo}{rest}")
    assert SECRET not in str(caught.value)
    assert "allowed are redis://" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"http://u:{SECRET}@h:1",
        f"u:{SECRET}@h:1",
        f"REDIS//u:{SECRET}@h:1",
        f"redis://x://u:{SECRET}@h:1/{'y' * 1000}",
        f"redis+sentinel://u:{SECRET}@h:1",
        f"redis+sentinel://u:{SECRET}@h:1/a b",
        f"redis+cluster://u:{SECRET}@h:1/3",
        f"redis+cluster://u:{SECRET}@h:1,",
        f"redis+cluster://u:{SECRET}@" + ",".join(["h:1"] * (MAX_HOSTS + 1)),
        f"redis+unknown://:{SECRET}@h",
    ],
)
def test_refusals_show_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(url)
    assert SECRET not in str(caught.value)
    assert len(str(caught.value)) < 800
    assert SECRET not in redact(url)


def test_none_is_no_index(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="uses no index"):
        open_index(make_config(index="none"))


def test_password_files(tmp_path: Path, make_config: MakeConfig) -> None:
    path = tmp_path / "password"
    url = "redis://127.0.0.1:1"
    for content in (b"", b"\n", b"a\nb\n", b"x" * 5000, b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="index_password_file is"):
            open_index(make_config(index=url, index_password_file=path))
    with pytest.raises(ConfigError, match="cannot be read"):
        open_index(make_config(index=url, index_password_file=tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="index_ca_file is"):
        open_index(make_config(index=url, index_ca_file=tmp_path / "nowhere"))
    path.write_text("  spaces count \r\n")
    assert read_password(path) == "  spaces count "


def test_fields_come_before_the_url(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("from-file\n")
    assert Credentials("u", "given", path).get_credentials() == ("u", "from-file")
    assert Credentials("u", "given", None).get_credentials() == ("u", "given")
    assert Credentials("", "given", None).get_credentials() == ("given",)


async def test_a_password_that_is_replaced(valkey: Server, make_config: MakeConfig, tmp_path: Path) -> None:
    """New connections use what the file holds by then."""
    client = valkey.client()
    client.execute_command("ACL", "SETUSER", "rotating", "reset", "on", ">first", "+@all", "~*")
    path = tmp_path / "password"
    path.write_text("first")
    index = open_index(make_config(index=valkey.url, index_user="rotating", index_password_file=path))
    await index.open()
    client.execute_command("ACL", "SETUSER", "rotating", "resetpass", ">second")
    path.write_text("second\n")
    client.execute_command("CLIENT", "KILL", "USER", "rotating")
    await eventually(lambda: _answers(index))
    path.unlink()
    client.execute_command("CLIENT", "KILL", "USER", "rotating")
    for _ in range(2):  # the first call may be the one that meets the cut connection
        with pytest.raises(IndexFault) as caught:
            await index.nodes()
    assert "index_password_file" in str(caught.value)
    await index.close()
    client.execute_command("ACL", "DELUSER", "rotating")


async def _answers(index: Index) -> bool:
    try:
        return await index.nodes() == []
    except IndexFault:
        return False


async def test_the_password_is_never_shown(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not by a server that repeats it, in no text, traceback or log, however detailed."""
    caplog.set_level(logging.DEBUG)

    async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            echo = f"-ERR unknown command 'AUTH', with args beginning with: 'user' '{SECRET}'\r\n"
            writer.write(echo.encode() * 4)
            await writer.drain()

    shown = []
    async with fake_server(repeat) as port:
        for kind, tail in (("redis", ""), ("redis+cluster", ""), ("redis+sentinel", "/m")):
            urls = (f"{kind}://user:{SECRET}@127.0.0.1:{port}{tail}", f"{kind}://127.0.0.1:{port}{tail}")
            for url, password in zip(urls, ("", SECRET), strict=True):
                index = open_index(make_config(index=url, index_user="user", index_password=password))
                shown += [repr(index), str(index), repr(copy.copy(index)), repr(index.address)]
                for call in (
                    lambda index=index: index.open(),
                    lambda index=index: index.publish(record_of(1), blocks_of(1), TierKind.DRAM),
                ):
                    with pytest.raises(KvtierError) as caught:
                        await call()
                    shown += [str(caught.value), repr(caught.value)]
                    shown.append("".join(traceback.format_exception(caught.value)))
                await index.close()
    output = capfd.readouterr()
    for text in (*shown, caplog.text, output.out, output.err):
        assert SECRET not in text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pa://ss@h:99999", "redis://***@h:99999"),
        ("redis://h:6379?password=pass", "redis://h:6379?***"),
        ("redis://u:p?ss@h:1?x=pass", "redis://***@h:1?***"),
        ("redis://h:6379/1", "redis://h:6379/1"),
        ("nonsense", "nonsense"),
    ],
)
def test_whatever_may_be_a_password_is_not_shown(url: str, shown: str) -> None:
    assert redact(url) == shown
