"""The command as a user runs it, against a real daemon."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pydantic import SecretStr

from kvtier.client import EngineClient, Pages
from kvtier.config import Config
from kvtier.demo.node import NodeProcess
from kvtier.types import Key, Layout, LayoutKind, LayoutOrder, Namespace, chain_keys
from tests.cli.conftest import Kvtier

LAYOUT = Layout(LayoutKind.GQA, 2, 1, 16, "bfloat16", 16, LayoutOrder.HND, 2 * 16 * 16 * 2)
BLOCKS = 6

Store = Callable[[int], list[Key]]


@pytest.fixture(scope="module")
def store(node: NodeProcess) -> Iterator[Store]:
    """Stores a chain of its own for every seed and answers its keys."""
    client = EngineClient(str(node.socket), LAYOUT, description="a test")
    memory = [np.ones((BLOCKS, LAYOUT.layer_block_bytes), np.uint8) for _ in range(LAYOUT.num_layers)]
    pages = Pages.from_tensors(memory, LAYOUT)

    def store(seed: int) -> list[Key]:
        root = Namespace(b"cli", LAYOUT.dtype, LAYOUT.fingerprint(), LAYOUT.block_tokens).root()
        keys = chain_keys(root, [seed] * (BLOCKS * LAYOUT.block_tokens), LAYOUT.block_tokens)
        assert client.store(None, keys, pages, list(range(BLOCKS))).committed == BLOCKS
        return keys

    yield store
    client.close()


def hexed(keys: list[Key]) -> list[str]:
    return [key.hex() for key in keys]


def test_version(kvtier: Kvtier) -> None:
    plain, as_json = kvtier("version"), kvtier("version", "--json")
    assert json.loads(as_json.stdout) == {"version": plain.stdout.strip()}
    assert (plain.returncode, plain.stderr) == (0, "")


def test_status(kvtier: Kvtier, node: NodeProcess, store: Store) -> None:
    store(1)
    done = kvtier("status", "--socket", str(node.socket), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    status = json.loads(done.stdout)
    assert status["node_id"] == node.readiness["node_id"]
    assert status["incarnation"] == node.readiness["incarnation"]
    assert status["counters"]["stored_blocks"] >= BLOCKS
    assert status["tiers"][0]["capacity_bytes"] == 16 << 20
    assert status["engines"][0]["fingerprint"] == LAYOUT.fingerprint().hex()
    assert status["notices"] == []
    table = kvtier("status", KVTIER_SOCKET=str(node.socket))
    assert table.returncode == 0
    assert "a test" in table.stdout
    assert "16 MiB" in table.stdout


def test_a_node_alone(kvtier: Kvtier, node: NodeProcess) -> None:
    at = ("--socket", str(node.socket))
    done = kvtier("nodes", "--json", *at)
    listed = json.loads(done.stdout)
    assert done.returncode == 0
    assert [each["node_id"] for each in listed["nodes"]] == [node.readiness["node_id"]]
    assert listed["nodes"][0]["is_self"] is True
    assert listed["nodes"][0]["capacity_bytes"] == 16 << 20
    for name in (node.readiness["node_id"], node.readiness["node_id"][:8], socket.gethostname()):
        done = kvtier("node", name, "--json", *at)
        assert (done.returncode, json.loads(done.stdout)["node_id"]) == (0, node.readiness["node_id"])
    assert "(this node)" in kvtier("node", socket.gethostname(), *at).stdout
    assert socket.gethostname() in kvtier("nodes", *at).stdout
    missing = kvtier("node", "nobody", "--json", *at)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "'nobody'" in missing.stderr
    assert kvtier("node", "x" * 300, *at).returncode == 2


def test_the_life_of_a_prefix(kvtier: Kvtier, node: NodeProcess, store: Store) -> None:
    keys = store(2)
    at = ("--socket", str(node.socket), "--json")
    found = json.loads(kvtier("lookup", *hexed(keys), *at).stdout)
    assert (found["blocks"], found["asked"]) == (BLOCKS, BLOCKS)
    assert [place["index"] for place in found["places"]] == list(range(BLOCKS))
    assert {place["tier"] for place in found["places"]} == {"dram"}
    assert {(place["replica"], place["hint"]) for place in found["places"]} == {(False, False)}

    pinned = json.loads(kvtier("pin", "--keys-file", "-", *at, stdin="\n".join(hexed(keys))).stdout)
    assert pinned["pinned"] == BLOCKS
    kept = kvtier("evict", hexed(keys)[0], *at)
    assert json.loads(kept.stdout) == {"evicted": 0, "kept": BLOCKS}
    assert kept.returncode == 1

    assert kvtier("unpin", "--pin-id", str(pinned["pin_id"]), *at).returncode == 0
    assert kvtier("unpin", "--pin-id", str(pinned["pin_id"]), *at).returncode == 1
    dropped = kvtier("evict", hexed(keys)[2], *at)
    assert json.loads(dropped.stdout) == {"evicted": BLOCKS - 2, "kept": 0}
    assert json.loads(kvtier("lookup", *hexed(keys), *at).stdout)["blocks"] == 2


def test_what_an_engine_has_in_its_own_memory(kvtier: Kvtier, node: NodeProcess, store: Store) -> None:
    keys = store(4)
    at = ("--socket", str(node.socket))
    with EngineClient(str(node.socket), LAYOUT, description="an engine", call_timeout_s=10.0) as client:
        holder = client.report_resident(keys[:2])
        places = json.loads(kvtier("lookup", *hexed(keys[1:]), *at, "--json").stdout)["places"]
        said = [(place["index"], place["tier"], place["holder"]) for place in places]
        assert said == [(0, "dram", None), (0, "hbm", holder), *[(i, "dram", None) for i in range(1, 5)]]
        assert (places[1]["size_bytes"], places[1]["offset_bytes"], places[1]["hint"]) == (None, None, False)
        assert str(holder) in kvtier("lookup", *hexed(keys), *at).stdout


def test_pins_are_ended_by_their_prefix(kvtier: Kvtier, node: NodeProcess, store: Store) -> None:
    keys = hexed(store(3))
    at = ("--socket", str(node.socket))
    assert kvtier("pin", *keys[:3], "--ttl-s", "60", *at).returncode == 0
    assert kvtier("unpin", *keys[:2], *at).returncode == 1
    done = kvtier("unpin", *keys[:3], *at)
    assert (done.returncode, done.stdout) == (0, "1 pins ended\n")


def test_what_is_not_there(kvtier: Kvtier, node: NodeProcess) -> None:
    at = ("--socket", str(node.socket))
    for command in ("lookup", "pin", "evict", "unpin"):
        done = kvtier(command, "77" * 32, *at)
        assert (done.returncode, done.stderr) == (1, ""), command


@pytest.mark.parametrize("command", ["status", "nodes", "node", "lookup", "pin", "unpin", "evict"])
def test_no_daemon(kvtier: Kvtier, short_dir: Path, command: str) -> None:
    keys = [] if command in ("status", "nodes") else ["77" * 32]
    done = kvtier(command, *keys, "--socket", str(short_dir / "none.sock"), "--json")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1
    assert "kvtier serve" in done.stderr


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (("status", "--socket", "not/absolute"), {}, "socket is 'not/absolute' (command line)"),
        (("status",), {"KVTIER_DRAM_BYTES": "lots"}, "dram_bytes is 'lots' (environment KVTIER_DRAM_BYTES)"),
        (("serve", "--lease-ttl-s", "-1"), {}, "lease_ttl_s is '-1' (command line)"),
        (("serve", "--config", "/nowhere.toml"), {}, "/nowhere.toml cannot be read"),
        (("lookup",), {}, "give the keys as arguments or in --keys-file"),
        (("lookup", "12"), {}, "key 1 is not 64 hex digits"),
        (("unpin", "77" * 32, "--pin-id", "1"), {}, "give --pin-id or keys, not both"),
        (("demo", "--json", "/nowhere/result.json"), {}, "--json /nowhere/result.json"),
        (("unpin", "--pin-id", "9" * 23), {}, "pin-id"),
    ],
)
def test_bad_usage(
    kvtier: Kvtier, words: tuple[str, ...], environment: dict[str, str], expected: str
) -> None:
    done = kvtier(*words, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "url", ["redis://u:s3cret@127.0.0.1:1", "rediss+cluster://:s3cret@h:1,h:2", "redis://u:a/s3cret@h"]
)
@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_password_on_the_command_line_is_refused_and_not_shown(
    kvtier: Kvtier, command: str, url: str
) -> None:
    done = kvtier(command, "--index", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "KVTIER_INDEX_PASSWORD" in done.stderr
    assert "s3cret" not in done.stderr


def test_unknown_options_are_bad_usage(kvtier: Kvtier) -> None:
    for words in (("status", "--bogus"), ("bogus",), ("check", "--skip", "bogus")):
        assert kvtier(*words).returncode == 2


def test_serve_has_an_option_for_each_field(kvtier: Kvtier) -> None:
    text = kvtier("serve", "--help", COLUMNS="200", TERMINAL_WIDTH="200").stdout
    secret = {name for name, field in Config.model_fields.items() if field.annotation is SecretStr}
    assert secret == {"index_password"}
    for name in Config.model_fields:
        option = f"--{name.replace('_', '-')} "
        assert (option in text) is (name not in secret)
        assert f"KVTIER_{name.upper()}" in text or name in secret


def test_help_says_what_exit_codes_mean(kvtier: Kvtier) -> None:
    for words in ((), ("status",), ("serve",), ("demo",), ("check",)):
        done = kvtier(*words, "--help")
        assert "Exit codes: 0 done" in done.stdout
        assert done.returncode == 0


def test_serve_reads_its_file_and_reports_on_stdout_only_when_asked(
    short_dir: Path, kvtier: Kvtier, node: NodeProcess
) -> None:
    file = short_dir / "kvtier.toml"
    file.write_text(f'data_dir = "{short_dir / "node" / "data"}"\nrun_dir = "{short_dir / "other"}"\n')
    done = kvtier("serve", "--config", str(file), "--dram-bytes", "64MiB", KVTIER_METRICS_PORT="0")
    assert done.returncode == 5
    assert done.stdout == ""
    assert str(node.readiness["pid"]) in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_names_a_port_in_use(short_dir: Path, kvtier: Kvtier) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        directories = ("--data-dir", str(short_dir / "d"), "--run-dir", str(short_dir / "r"))
        done = kvtier("serve", *directories, "--dram-bytes", "64MiB", "--metrics-port", port)
    assert done.returncode in (4, 5)
    assert port in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_names_memory_that_is_not_there_and_leaves_nothing(short_dir: Path, kvtier: Kvtier) -> None:
    directories = ("--data-dir", str(short_dir / "d2"), "--run-dir", str(short_dir / "r2"))
    done = kvtier("serve", *directories, "--dram-bytes", "500TiB", "--metrics-port", "-1")
    assert done.returncode == 4
    assert "dram_bytes" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (short_dir / "d2").exists()
    assert not (short_dir / "r2").exists()


def test_a_result_replaces_only_regular_files(kvtier: Kvtier, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "link").symlink_to(precious)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        done = kvtier("demo", "--json", str(tmp_path / name))
        assert (done.returncode, done.stdout) == (2, "")
        assert "regular file" in done.stderr
        assert os.path.lexists(tmp_path / name)
    assert precious.read_text() == "kept"


def test_a_user_without_a_home_is_told_what_to_set() -> None:
    code = (
        "import os\nos.setuid(54321)\n"
        "for name in ('HOME', 'XDG_STATE_HOME'):\n    os.environ.pop(name, None)\n"
        "from kvtier.errors import ConfigError\nfrom kvtier.config import Config\n"
        "try:\n    Config.load()\nexcept ConfigError as error:\n    print(error)"
    )
    imports = (
        "import kvtier.config, kvtier.cli.main\n"  # before the user changes: it may not read the packages
    )
    if os.geteuid():
        pytest.skip("only root can become a user without an entry")
    done = subprocess.run([sys.executable, "-c", imports + code], capture_output=True, text=True, check=True)
    assert "KVTIER_DATA_DIR" in done.stdout


def test_a_daemon_whose_memory_is_removed_says_so_and_ends(short_dir: Path) -> None:
    with NodeProcess(short_dir / "cleaned", dram_bytes=64 << 20) as node:
        (arena,) = Path("/dev/shm").glob(f"kvtier-{node.readiness['node_id'][:12]}*.arena")
        arena.unlink()
        assert node.process.wait(30) == 4
        assert "removed by somebody else" in node.process.tail()
        assert "Traceback" not in node.process.tail()
    assert not list(Path("/dev/shm").glob(f"kvtier-{node.readiness['node_id'][:12]}*"))


def test_misspelt_variables_are_named(short_dir: Path, kvtier: Kvtier) -> None:
    directories = ("--data-dir", str(short_dir / "d3"), "--run-dir", str(short_dir / "r3"))
    done = kvtier("serve", *directories, "--dram-bytes", "500TiB", "--metrics-port", "-1", KVTIER_DRAM="2")
    assert "KVTIER_DRAM" in done.stderr


def test_a_stopped_daemon_leaves_no_memory_and_no_socket(short_dir: Path, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("kvtier-*"))
    with NodeProcess(short_dir / "short", dram_bytes=64 << 20) as node:
        assert node.socket.exists()
        mine = set(Path("/dev/shm").glob(f"kvtier-{node.readiness['node_id'][:12]}*"))
        assert mine - before
    assert node.process.stop() == 0
    assert not node.socket.exists()
    assert not any(path.exists() for path in mine)


def test_the_command_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, kvtier.cli.main, kvtier.daemon\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'httpx', 'nixl_cu12'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
