from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvtier import machine
from kvtier.config import MIB, Config
from kvtier.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVTIER_"):
            monkeypatch.delenv(name)


def toml(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_need_nothing() -> None:
    config = Config.load()
    assert config.socket == config.run_dir / "kvtier.sock"
    assert config.node_name
    assert config.extent_bytes == 64 * MIB
    assert config.dram_bytes % config.extent_bytes == 0
    assert config.dram_bytes >= config.extent_bytes
    assert config.metrics_port == 9470


def test_each_source_beats_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toml(tmp_path / "kvtier.toml", "lease_ttl_s = 1\nhold_ttl_s = 1\ntick_s = 1\n")
    monkeypatch.setenv("KVTIER_LEASE_TTL_S", "2")
    monkeypatch.setenv("KVTIER_HOLD_TTL_S", "2")
    config = Config.load(file, lease_ttl_s=3, tick_s=None)
    assert (config.lease_ttl_s, config.hold_ttl_s, config.tick_s) == (3, 2, 1)
    assert config.reservation_ttl_s == 60


def test_the_environment_can_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CONFIG", str(toml(tmp_path / "kvtier.toml", "max_engines = 7\n")))
    assert Config.load().max_engines == 7
    other = toml(tmp_path / "other.toml", "max_engines = 8\n")
    assert Config.load(other).max_engines == 8


def test_an_empty_variable_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_MAX_ENGINES", "")
    assert Config.load().max_engines == 64


def test_the_plain_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_MAX_ENGINES", "7")
    assert Config().max_engines == 64


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 * MIB),
        ("8GiB", 8 << 30),
        ("1.5 GiB", 3 << 29),
        (128 * MIB, 128 * MIB),
        (str(128 * MIB), 128 * MIB),
        (100 * MIB, 64 * MIB),
        ("1GB", 10**9 // (64 * MIB) * 64 * MIB),
    ],
)
def test_sizes_are_whole_extents(text: object, size_bytes: int) -> None:
    assert Config(dram_bytes=text).dram_bytes == size_bytes


def test_auto_is_a_part_of_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_total_bytes", lambda: 64 << 30)
    monkeypatch.setattr(machine, "memory_available_bytes", lambda: 60 << 30)
    monkeypatch.setattr(machine, "free_bytes", lambda directory: 40 << 30)
    assert Config(dram_bytes="AUTO").dram_bytes == 16 << 30
    monkeypatch.setattr(machine, "free_bytes", lambda directory: 10 << 30)
    assert Config().dram_bytes == 5 << 30
    monkeypatch.setattr(machine, "memory_available_bytes", lambda: 2 << 30)
    assert Config().dram_bytes == 1 << 30


def test_auto_is_never_an_error_for_commands_that_need_no_arena(tmp_path: Path) -> None:
    config = Config(shm_dir=tmp_path / "missing")
    assert config.dram_bytes == config.extent_bytes


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("dram_bytes", "8GGiB", "'8GiB'"),
        ("dram_bytes", 1.5, "whole number"),
        ("dram_bytes", True, "whole number"),
        ("dram_bytes", -1, "whole number"),
        ("dram_bytes", "1MiB", f"one extent ({64 * MIB} bytes)"),
        ("dram_bytes", "4EiB", "one extent"),
        ("extent_bytes", 1000, "multiple of"),
        ("extent_bytes", "2GiB", "1 GiB"),
        ("run_dir", "relative/dir", "absolute"),
        ("run_dir", "/" + "x" * 120, "a Unix socket's has at most 107"),
        ("run_dir", "/tmp/a\0b", "NUL"),
        ("tls_key_file", "/tmp/a\0b", "NUL"),
        ("lease_ttl_s", True, "true and false are none"),
        ("max_leased_fraction", True, "true and false are none"),
        ("max_engines", True, "true and false are none"),
        ("peer_port", True, "true and false are none"),
        ("metrics_port", False, "true and false are none"),
        ("socket", "/" + "x" * 120, "107"),
        ("lease_ttl_s", 0, "greater than 0"),
        ("lease_ttl_s", float("nan"), "finite"),
        ("lease_ttl_s", "soon", "number"),
        ("max_engines", 0, "greater than or equal to 1"),
        ("max_leased_fraction", 1.5, "less than or equal to 1"),
        ("max_message_bytes", 1, "128 KiB"),
        ("verify_loads", "maybe", "'off', 'sample' or 'all'"),
        ("scrub_bytes_per_s", -1, "whole number"),
        ("metrics_port", 65_536, "65535"),
        ("log_level", "loud", "'debug'"),
        ("policy", "fifo", "allowed are lru, s3fifo, worth"),
    ],
)
def test_what_is_not_allowed_names_field_value_and_what_is(field: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(allowed)) as caught:
        Config.load(**{field: value})
    assert f"{field} is {value!r} (command line)" in str(caught.value)
    with pytest.raises(ConfigError, match=re.escape(allowed)):
        Config(**{field: value})


def test_an_error_says_which_source_it_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toml(tmp_path / "kvtier.toml", "max_engines = 0\n")
    monkeypatch.setenv("KVTIER_MAX_HOLDS", "many")
    with pytest.raises(ConfigError) as caught:
        Config.load(file)
    assert f"max_engines is 0 (file {file})" in str(caught.value)
    assert "max_holds is 'many' (environment KVTIER_MAX_HOLDS)" in str(caught.value)


def test_no_number_in_a_file_may_be_true_or_false(tmp_path: Path) -> None:
    numbers = [name for name, field in Config.model_fields.items() if field.annotation in (int, float)]
    assert len(numbers) > 30
    file = toml(tmp_path / "kvtier.toml", "".join(f"{name} = true\n" for name in numbers))
    with pytest.raises(ConfigError) as caught:
        Config.load(file)
    told = str(caught.value).splitlines()
    assert [line.split(" is ")[0] for line in told] == numbers
    assert all(f"is True (file {file}): allowed is" in line for line in told)


def test_a_run_dir_too_long_for_its_socket_is_named_not_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = "/" + "x" * 100
    monkeypatch.setenv("KVTIER_RUN_DIR", directory)
    with pytest.raises(ConfigError) as caught:
        Config.load()
    assert str(caught.value).startswith(f"run_dir is '{directory}' (environment KVTIER_RUN_DIR): its socket")
    assert Config.load(socket=f"{directory}/s").socket.name == "s"


def test_an_unknown_key_is_an_error_that_lists_the_fields(tmp_path: Path) -> None:
    file = toml(tmp_path / "kvtier.toml", 'dram_byte = "8GiB"\n')
    with pytest.raises(ConfigError, match=r"dram_byte \(file .*\) is not a field: allowed are .*dram_bytes"):
        Config.load(file)


@pytest.mark.parametrize("text", ["= nonsense", "max_engines = 1\nmax_engines = 2"])
def test_a_file_that_is_not_toml(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
        Config.load(toml(tmp_path / "bad.toml", text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        Config.load(tmp_path / "none.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(binary)


def test_a_call_of_the_most_keys_fits_a_message() -> None:
    with pytest.raises(ConfigError, match=r"max_keys_per_call is 100000.*max_message_bytes"):
        Config(max_keys_per_call=100_000)
    assert Config(max_keys_per_call=100_000, max_message_bytes="8MiB").max_keys_per_call == 100_000


def test_one_bad_field_is_reported_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(run_dir="relative", extent_bytes=3)
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["run_dir", "extent_bytes"]


def test_a_configuration_does_not_change() -> None:
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.max_engines = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("line", "root", "limit_file", "usage_file", "prefix"),
    [
        ("0::/system.slice/kvtier.service", "", "memory.max", "memory.current", ""),
        ("4:cpu,memory:/a/b", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
@pytest.mark.parametrize("level", ["own", "parent", "root"])
def test_a_control_group_s_limit_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    root: str,
    limit_file: str,
    usage_file: str,
    prefix: str,
    level: str,
) -> None:
    whole = machine.memory_total_bytes()
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {whole // 1024} kB\nMemAvailable: {whole // 1024} kB\n")
    (proc / "self/cgroup").write_text(f"1:name=systemd:/x\n{line}\n")
    inner = line.rpartition(":")[2].lstrip("/")
    folder = groups / root / {"own": inner, "parent": inner.split("/")[0], "root": ""}[level]
    folder.mkdir(parents=True)
    monkeypatch.setattr(machine, "_PROC", proc)
    monkeypatch.setattr(machine, "_CGROUPS", groups)
    assert machine.memory_total_bytes() == whole
    (folder / limit_file).write_text("max\n")
    (folder / usage_file).write_text("1\n")
    assert machine.memory_total_bytes() == whole
    (folder / limit_file).write_text(f"{256 * MIB}\n")
    (folder / usage_file).write_text(f"{100 * MIB}\n")
    (folder / "memory.stat").write_text(
        f"{prefix}inactive_file {10 * MIB}\n{prefix}active_file {5 * MIB}\n{prefix}shmem {50 * MIB}\n"
    )
    assert machine.memory_total_bytes() == 256 * MIB
    assert machine.memory_available_bytes() == 171 * MIB
    (folder / usage_file).write_text(f"{300 * MIB}\n")
    assert machine.memory_available_bytes() == 0


@pytest.mark.parametrize("field", ["data_dir", "run_dir", "socket", "shm_dir", "nvme_paths"])
def test_a_home_that_nobody_has(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*home directory"):
        Config.load(**{field: "~no-such-user/x"})


@pytest.mark.parametrize("value", ["[1, 2]", "[[1]]", "{a = 1}", "3"])
def test_paths_that_are_none(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"nvme_paths.*allowed are paths"):
        Config.load(toml(tmp_path / "kvtier.toml", f"nvme_paths = {value}\n"))


def test_a_policy_from_each_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config().policy == "lru"
    assert Config.load(toml(tmp_path / "kvtier.toml", 'policy = "worth"\n')).policy == "worth"
    monkeypatch.setenv("KVTIER_POLICY", "S3FIFO")
    assert Config.load().policy == "s3fifo"
    assert Config.load(policy="worth").policy == "worth"
    monkeypatch.setenv("KVTIER_POLICY", "random")
    with pytest.raises(ConfigError, match=r"policy is 'random' \(environment KVTIER_POLICY\)"):
        Config.load()


def test_no_index_in_any_case() -> None:
    assert Config(index=" NONE ").has_no_index
    assert not Config(index="").has_no_index


def test_two_services_on_one_port() -> None:
    with pytest.raises(ConfigError, match="peer_port and metrics_port are both 9470"):
        Config.load(peer_port=9470)
    assert Config(peer_port=0, metrics_port=0).peer_port == 0
    assert Config(peer_port=-1, metrics_port=-1).peer_port == -1


def test_device_memory_is_off_whole_extents_and_of_a_known_device() -> None:
    assert (Config().hbm_bytes, Config().hbm_device, Config().promote_after_uses) == (0, "cuda:0", 2)
    config = Config(hbm_bytes="200MiB", hbm_device="CPU", promote_after_uses=1)
    assert (config.hbm_bytes, config.hbm_device) == (192 * MIB, "cpu")
    for field, value, allowed in (
        ("hbm_bytes", MIB, "one extent"),
        ("hbm_device", "gpu0", "cuda:0"),
        ("hbm_device", "cuda:", "cuda:0"),
        ("promote_after_uses", 0, "greater than or equal to 1"),
    ):
        with pytest.raises(ConfigError, match=rf"{field} is .*{allowed}"):
            Config(**{field: value})
