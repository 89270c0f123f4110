"""The one configuration of a node, and the only reader of the environment.

`Config.load` takes, first match wins: explicit values (command line), environment variables
``KVTIER_<FIELD>``, a TOML file (``--config`` or ``KVTIER_CONFIG``), the defaults below. `Config(...)`
itself reads neither environment nor file.
"""

from __future__ import annotations

import mmap
import os
import socket as sockets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvtier import machine
from kvtier.core.policies import POLICIES
from kvtier.errors import ConfigError
from kvtier.paths import SOCKET_NAME, default_run_dir

MIB: Final = 1 << 20
MAX_SOCKET_PATH_BYTES: Final = 107
"""What `sun_path` of a Unix socket's address holds."""
MAX_NUMA_NODES: Final = 1024
"""As many as any kernel counts."""
_WIRE_BYTES_PER_KEY: Final = 48
_WIRE_BYTES_PER_CALL: Final = 64 << 10
_PREFIX: Final = "KVTIER_"
_BYTE_SIZE: Final = TypeAdapter(ByteSize)
_LONG_RUN_DIR: Final = "run_dir_too_long"


def _no_nul(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("a path has no NUL in it")
    return path


def _absolute(path: Path) -> Path:
    path = _no_nul(path)
    try:
        path = path.expanduser()
    except RuntimeError:
        raise ValueError("the home directory that ~ stands for is not known") from None
    if not path.is_absolute():
        raise ValueError("the path has to be absolute")
    return path


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _no_flag(value: Any) -> Any:
    """To Python true is 1, to whoever writes a TOML file it is not."""
    if isinstance(value, bool):
        raise ValueError("allowed is a number, true and false are none")
    return value


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"allowed are {', '.join(POLICIES)}")
    return name


Size = Annotated[int, BeforeValidator(lambda value: _parse_size(value))]
Directory = Annotated[Path, AfterValidator(_absolute)]
File = Annotated[Path, AfterValidator(_no_nul)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False), BeforeValidator(_no_flag)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), BeforeValidator(_no_flag)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(_no_flag)]
Port = Annotated[int, Field(ge=-1, le=65_535), BeforeValidator(_no_flag)]
Verify = Annotated[Literal["off", "sample", "all"], BeforeValidator(_lower)]


def _split_paths(value: Any) -> Any:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(part, str | Path) for part in value):
        raise ValueError("allowed are paths, separated by commas")
    paths = tuple(_absolute(Path(part)) for part in value)
    if len(set(paths)) != len(paths):
        raise ValueError("allowed is each path once")
    return paths


Paths = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split_paths)]


class FarRegion(NamedTuple):
    """Far memory of one NUMA node; `node` None: wherever the kernel puts it."""

    node: int | None
    size_bytes: int


def _parse_node(value: Any) -> Any:
    if isinstance(value, str):
        value = value.strip().lower()
    if value is None or value in ("", "none"):
        return None
    if value == "auto":
        return value
    if not isinstance(value, bool) and str(value).isascii() and str(value).isdigit():
        node = int(value)
        if node < MAX_NUMA_NODES:
            return node
    raise ValueError(f"allowed is the number of a NUMA node, below {MAX_NUMA_NODES}, 'auto' or 'none'")


def _split_far(value: Any) -> Any:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    regions = [_parse_far(part) for part in value] if isinstance(value, list | tuple) else [None]
    found = [region for region in regions if region is not None]
    if len(found) != len(regions):
        raise ValueError("allowed is NODE:SIZE, separated by commas, like '1:64GiB,2:128GiB' or 'any:8GiB'")
    if len({region.node for region in found}) != len(found):
        raise ValueError("allowed is each node once")
    return tuple(found)


def _parse_far(part: Any) -> FarRegion | None:
    if isinstance(part, FarRegion):
        return part
    name, colon, size = part.partition(":") if isinstance(part, str) else ("", "", "")
    if not colon:
        return None
    try:
        node = None if name.strip().lower() == "any" else _parse_node(name)
        if node == "auto" or (node is None and name.strip().lower() != "any"):
            return None
        return FarRegion(node, _parse_size(size.strip()))
    except ValueError:
        return None


NumaNode = Annotated[int | Literal["auto"] | None, BeforeValidator(_parse_node)]
FarRegions = Annotated[tuple[FarRegion, ...], NoDecode, BeforeValidator(_split_far)]


def _parse_size(value: Any) -> int:
    if not isinstance(value, bool) and isinstance(value, int | str):
        try:
            return int(_BYTE_SIZE.validate_python(value))
        except ValidationError:
            pass
    raise ValueError("allowed is a whole number of bytes, or a size like '512MiB' or '8GiB'")


def _data_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/kvtier")
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "kvtier"
    except RuntimeError:  # neither HOME nor an entry in the user database
        raise ConfigError(
            "data_dir has no default, since this user has no home directory: set it, or KVTIER_DATA_DIR"
        ) from None


def _run_dir() -> Path:
    return default_run_dir(os.geteuid(), os.environ)


class Config(BaseSettings):
    """Everything that can be configured; frozen. Sizes are in bytes, times in seconds."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=_PREFIX, env_ignore_empty=True, validate_default=True
    )

    node_name: str = Field("", max_length=253, description="name for operators; empty: the host's name")
    data_dir: Directory = Field(
        default_factory=_data_dir, description="identity and lock of this node; one live daemon each"
    )
    run_dir: Directory = Field(
        default_factory=_run_dir, description="socket and lock files of engines; mode 0700"
    )
    socket: Directory = Field(
        default_factory=lambda data: data["run_dir"] / SOCKET_NAME,
        description=f"Unix socket of the daemon, at most {MAX_SOCKET_PATH_BYTES} bytes long",
    )

    shm_dir: Directory = Field(Path("/dev/shm"), description="file system of shared memory for the arena")
    extent_bytes: Size = Field(64 * MIB, description="unit of the arena: whole pages, 64 KiB to 1 GiB")
    dram_bytes: Size = Field(  # type: ignore[assignment]  # becomes an int in `_choose_dram`
        "auto",
        description="hard cap of the DRAM tier, rounded down to whole extents: bytes, '8GiB', or 'auto' "
        "(a quarter of memory, at most half of what is free)",
    )
    numa_node: NumaNode = Field(
        None,
        description="NUMA node that the arena's memory comes from: its number, 'auto' (those of the CPUs "
        "that the daemon may run on), or 'none': where the kernel puts it",
    )
    huge_pages: Annotated[Literal["off", "advise", "require"], BeforeValidator(_lower)] = Field(
        "advise",
        description="huge pages for the arena and far memory: off, advise (where the kernel gives some), or "
        "require (no start without)",
    )
    far_memory: FarRegions = Field(
        (),
        description="further memory below the DRAM tier, hard caps rounded down to whole extents: "
        "NODE:SIZE,..., like '1:64GiB,2:128GiB' (CXL memory is a NUMA node); 'any' for no node; none: no "
        "such tier",
    )
    old_arena_deadline_s: Seconds = Field(
        30.0, description="after this time arenas of an earlier daemon that engines still map are emptied"
    )

    nvme_paths: Paths = Field(
        (),
        description="directories or block devices of the NVMe tier, separated by commas, for good (what is "
        "on a block device is overwritten); none: no such tier",
    )
    nvme_bytes: Size = Field(
        0, description="hard cap of the NVMe tier over all its paths, rounded down to whole extents"
    )
    nvme_codec: Annotated[Literal["raw", "lz4", "zstd", "auto"], BeforeValidator(_lower)] = Field(
        "auto",
        description="how blocks lie on the NVMe tier: raw, lz4, zstd, or auto (the codec with which they are "
        "read faster there, if any)",
    )
    tier_deadline_s: Seconds = Field(
        5.0, description="a medium that takes longer to answer is out of use until it does"
    )
    hbm_bytes: Size = Field(
        0,
        description="hard cap of the HBM tier, rounded down to whole extents: device memory that this node "
        "takes for copies of what engines on the same machine read most; 0: no such tier",
    )
    hbm_device: Annotated[str, BeforeValidator(_lower)] = Field(
        "cuda:0",
        pattern=r"^(cpu|cuda:[0-9]{1,3})$",
        description="where that memory is: 'cuda:0', another number, or 'cpu' (shared memory that stands for "
        "it, for tests)",
    )
    promote_after_uses: Count = Field(
        2, description="blocks are copied to the HBM tier only after so many uses; storing one is the first"
    )
    policy: Annotated[str, BeforeValidator(_lower), AfterValidator(_known_policy)] = Field(
        "lru",
        description=f"which blocks go down and out first: {', '.join(POLICIES)}",
    )
    demote_high_fraction: Fraction = Field(
        0.75, description="where a tier is fuller, its coldest blocks are copied to the tier below"
    )
    admit_after_uses: Count = Field(
        1, description="blocks are copied to the tier below only after so many uses; storing one is the first"
    )
    admit_by_worth: bool = Field(
        False,
        description="blocks are copied to a full NVMe tier only if the policy would keep them there longer "
        "than what has to go for them",
    )
    demote_bytes_per_s: Size = Field(
        1024 * MIB,
        description="bytes copied each second to each tier below, and to the HBM tier; 0: no limit",
    )

    lease_ttl_s: Seconds = Field(30.0, description="a read may take this long")
    hold_ttl_s: Seconds = Field(30.0, description="an offer stays protected this long")
    reservation_ttl_s: Seconds = Field(60.0, description="a store may take this long")
    engine_poll_s: Seconds = Field(0.5, description="how often engines are probed for life")
    tick_s: Seconds = Field(0.5, description="how often leases, holds, reservations and pins are expired")

    max_engines: Count = Field(64, description="engine processes registered at once")
    max_keys_per_call: Count = Field(65_536, description="keys in one call")
    max_leases_per_engine: Count = Field(1024, description="leases that one engine has at once")
    max_holds: Count = Field(65_536, description="requests with an offer at once")
    max_leased_fraction: Fraction = Field(0.5, description="part of a tier that one engine may lease")
    max_unfinished_fraction: Fraction = Field(
        0.25, description="part of a tier that one engine may have reserved or in quarantine"
    )
    max_pinned_fraction: Fraction = Field(0.5, description="part of a tier that may be pinned")
    max_replies: Count = Field(4096, description="answers kept per engine for repeated calls")
    max_message_bytes: Size = Field(4 * MIB, description="size of one message, 128 KiB to 1 GiB")

    verify_loads: Verify = Field("sample", description="which loads engines check: off, sample or all")
    verify_commits: Verify = Field("sample", description="which commits the node checks: off, sample or all")
    scrub_bytes_per_s: Size = Field(
        64 * MIB, description="bytes that are verified in the background each second; 0: none"
    )

    index: str = Field(
        "",
        description="where locations are shared: redis://HOST:PORT[/DB], rediss://..., "
        "redis+sentinel://HOST:PORT,HOST:PORT/MASTER, redis+cluster://HOST:PORT,..., 'none', or empty: a "
        "private Valkey of this node",
    )
    index_user: str = Field("", description="ACL user of the index; empty: the default user")
    index_password: SecretStr = Field(SecretStr(""), description="password of the index")
    index_password_file: File | None = Field(None, description="file that holds the password instead")
    index_ca_file: File | None = Field(
        None, description="CA of the index's TLS certificate; empty: the system's"
    )
    index_prefix: str = Field(
        "kvtier", pattern=r"^[A-Za-z0-9_.:-]{1,64}$", description="first part of every key in the index"
    )
    index_ttl_s: Seconds = Field(
        3600.0, description="a location that its owner does not renew ends after this"
    )
    index_timeout_s: Seconds = Field(0.02, description="a lookup waits so long for the index")
    heartbeat_s: Seconds = Field(5.0, description="how often a node says that it lives")
    dead_after_s: Seconds = Field(15.0, description="a node without heartbeat counts as dead after this")
    publish_per_s: Count = Field(
        20_000, description="locations that are republished or reconciled each second"
    )
    max_unpublished: Count = Field(1_000_000, description="changes kept while the index cannot be reached")

    peer_host: str = Field("127.0.0.1", description="address that other nodes' calls are answered on")
    peer_port: Port = Field(0, description="its port; 0: any free port, -1: no peers")
    peer_address: str = Field("", description="HOST:PORT under which others reach it; empty: as bound")
    insecure: bool = Field(False, description="allow peers off the loopback without TLS")
    tls_cert_file: File | None = Field(None, description="this node's certificate for peers (PEM)")
    tls_key_file: File | None = Field(None, description="its private key (PEM)")
    tls_ca_file: File | None = Field(
        None, description="the CA that peers' certificates have to be signed by (PEM)"
    )
    transfer: Annotated[Literal["auto", "nixl", "stream"], BeforeValidator(_lower)] = Field(
        "auto", description="how bytes come from peers: nixl, stream (gRPC), or auto (the best that works)"
    )
    transfer_codec: Annotated[Literal["auto", "off"], BeforeValidator(_lower)] = Field(
        "off",
        description="whether streams between nodes go through a lossless codec: auto (where the way is "
        "found to be slower than the codec, and both nodes say so) or off; what NIXL reads never does",
    )
    pull_batch_bytes: Size = Field(16 * MIB, description="bytes of one step of a pull, 1 MiB to 1 GiB")
    pull_floor_s: Seconds = Field(0.1, description="a pull may take twice its estimate, but at least this")
    max_pulls: Count = Field(64, description="pulls at once")
    pull_bytes_per_s: Size = Field(1000 * MIB, description="believed of a peer until it has been measured")
    max_pulled_fraction: Fraction = Field(
        0.25, description="part of a tier that pulls may be filling at once"
    )
    max_given_fraction: Fraction = Field(0.25, description="part of a tier that one peer may lease")

    metrics_port: Port = Field(9470, description="Prometheus metrics on loopback; 0: any free port, -1: off")
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)
    ] = Field("info", description="debug, info, warning, error or critical")
    log_format: Annotated[Literal["auto", "json", "console"], BeforeValidator(_lower)] = Field(
        "auto", description="logs on stderr: json, console, or auto (console on a terminal)"
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error, {})) from None

    @classmethod
    def load(cls, config_file: Path | str | None = None, **overrides: Any) -> Self:
        """The configuration from all sources.

        Parameters
        ----------
        config_file
            TOML file whose top-level keys are fields; None: the one that ``KVTIER_CONFIG`` names, if any.
        overrides
            Explicit values; None means "not given".

        Raises
        ------
        ConfigError
            Names the field, its value, where it came from and what is allowed.
        """
        config_file = config_file or os.environ.get(f"{_PREFIX}CONFIG") or None
        origins: dict[str, str] = {}
        values: dict[str, Any] = {}
        for origin, found in (
            (f"file {config_file}", _read_toml(Path(config_file)) if config_file else {}),
            ("environment", EnvSettingsSource(cls)()),
            ("command line", {name: value for name, value in overrides.items() if value is not None}),
        ):
            values |= found
            origins |= {name: _origin(origin, name) for name in found}
        self = cls.__new__(cls)
        try:
            BaseSettings.__init__(self, **values)
        except ValidationError as error:
            raise ConfigError(_explain(error, origins)) from None
        return self

    @property
    def has_no_index(self) -> bool:
        """Whether it is said that there is none, not even a private one."""
        return self.index.strip().lower() == "none"

    @staticmethod
    def unknown_variables() -> list[str]:
        """Names of variables that look like a field of this configuration and are none."""
        known = {f"{_PREFIX}{name.upper()}" for name in Config.model_fields} | {f"{_PREFIX}CONFIG"}
        return sorted(
            name for name in os.environ if name.upper().startswith(_PREFIX) and name.upper() not in known
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed: `load` merges the sources, so that it can say where a value came from."""
        return (init_settings,)

    @field_validator("node_name")
    @classmethod
    def _name_the_node(cls, value: str) -> str:
        return value or sockets.gethostname()

    @field_validator("socket")
    @classmethod
    def _fit_the_socket(cls, value: Path, info: ValidationInfo) -> Path:
        length = len(os.fsencode(value))
        if length <= MAX_SOCKET_PATH_BYTES:
            return value
        run_dir = info.data.get("run_dir")
        if run_dir is not None and value == run_dir / SOCKET_NAME:
            raise PydanticCustomError(
                _LONG_RUN_DIR,
                "its socket {name} would have a path of {length} bytes, a Unix socket's has at most {most}; "
                "choose a shorter directory",
                {"name": SOCKET_NAME, "length": length, "most": MAX_SOCKET_PATH_BYTES, "run_dir": run_dir},
            )
        raise ValueError(f"the path has {length} bytes, a Unix socket's has at most {MAX_SOCKET_PATH_BYTES}")

    @field_validator("extent_bytes")
    @classmethod
    def _whole_pages(cls, value: int) -> int:
        if value % mmap.PAGESIZE or not 64 << 10 <= value <= 1 << 30:
            raise ValueError(f"allowed is a multiple of {mmap.PAGESIZE} between 64 KiB and 1 GiB")
        return value

    @field_validator("dram_bytes", mode="before")
    @classmethod
    def _choose_dram(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str) or value.strip().lower() != "auto":
            return value
        # Where one of these is itself not allowed, its own error is the one to report.
        return _auto_dram_bytes(
            info.data.get("shm_dir", Path()), info.data.get("extent_bytes", mmap.PAGESIZE)
        )

    @field_validator("dram_bytes")
    @classmethod
    def _whole_extents(cls, value: int, info: ValidationInfo) -> int:
        extent_bytes = info.data.get("extent_bytes", mmap.PAGESIZE)
        if not extent_bytes <= value < 1 << 50:
            raise ValueError(f"allowed is one extent ({extent_bytes} bytes) or more")
        return value // int(extent_bytes) * int(extent_bytes)

    @field_validator("far_memory")
    @classmethod
    def _far_whole_extents(cls, value: tuple[FarRegion, ...], info: ValidationInfo) -> tuple[FarRegion, ...]:
        extent_bytes = int(info.data.get("extent_bytes", mmap.PAGESIZE))
        if not all(extent_bytes <= region.size_bytes < 1 << 50 for region in value):
            raise ValueError(f"allowed is one extent ({extent_bytes} bytes) or more for each node")
        return tuple(
            FarRegion(region.node, region.size_bytes // extent_bytes * extent_bytes) for region in value
        )

    @field_validator("hbm_bytes")
    @classmethod
    def _hbm_whole_extents(cls, value: int, info: ValidationInfo) -> int:
        extent_bytes = int(info.data.get("extent_bytes", mmap.PAGESIZE))
        if value and not extent_bytes <= value < 1 << 50:
            raise ValueError(f"allowed is 0, or one extent ({extent_bytes} bytes) or more")
        return value // extent_bytes * extent_bytes

    @model_validator(mode="after")
    def _heartbeats_come_in_time(self) -> Self:
        if self.dead_after_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"dead_after_s is {self.dead_after_s:g} and heartbeat_s is {self.heartbeat_s:g}: a node "
                "would count as dead because of one late heartbeat; allowed is at least twice heartbeat_s"
            )
        return self

    @model_validator(mode="after")
    def _nvme_has_paths_and_room(self) -> Self:
        if bool(self.nvme_paths) != bool(self.nvme_bytes):
            raise ValueError(
                f"nvme_paths is {','.join(map(str, self.nvme_paths)) or 'empty'} and nvme_bytes is "
                f"{self.nvme_bytes}: set both, or neither for no NVMe tier"
            )
        if self.nvme_bytes and self.nvme_bytes < 2 * self.extent_bytes * len(self.nvme_paths):
            raise ValueError(
                f"nvme_bytes is {self.nvme_bytes}: allowed is two extents ({self.extent_bytes} bytes each) "
                "or more for each of nvme_paths"
            )
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.peer_port > 0 and self.peer_port == self.metrics_port:
            raise ValueError(
                f"peer_port and metrics_port are both {self.peer_port}: give each a port of its own, or 0 "
                "for any free one"
            )
        return self

    @field_validator("max_message_bytes")
    @classmethod
    def _bounded_messages(cls, value: int) -> int:
        if not 128 << 10 <= value <= 1 << 30:
            raise ValueError("allowed is 128 KiB to 1 GiB")
        return value

    @model_validator(mode="after")
    def _keys_fit_a_message(self) -> Self:
        need = self.max_keys_per_call * _WIRE_BYTES_PER_KEY + _WIRE_BYTES_PER_CALL
        if need > self.max_message_bytes:
            raise ValueError(
                f"max_keys_per_call is {self.max_keys_per_call}: a call of so many keys has {need} bytes, "
                f"but max_message_bytes is {self.max_message_bytes}; raise it or lower max_keys_per_call"
            )
        return self


def _auto_dram_bytes(shm_dir: Path, extent_bytes: int) -> int:
    """A quarter of memory, at most half of what is free; never below one extent.

    Never an error: a command that only needs the socket loads the same configuration, also while the
    daemon's own arena fills the shared memory. The arena itself says at start what is missing.
    """
    limits = [machine.memory_total_bytes() // 4, machine.memory_available_bytes() // 2]
    try:
        limits.append(machine.free_bytes(shm_dir) // 2)
    except OSError:
        limits.append(0)
    return max(extent_bytes, min(limits) // extent_bytes * extent_bytes)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from error


def _origin(origin: str, name: str) -> str:
    return f"environment {_PREFIX}{name.upper()}" if origin == "environment" else origin


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """All that is wrong, one line each: field, value, where it came from, what is allowed."""
    return "\n".join(
        _explain_one(dict(detail), origins)
        for detail in error.errors(include_url=False)
        if detail["type"] != "default_factory_not_called"
    )


def _explain_one(detail: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ")
    if not detail["loc"]:
        return message
    name, value = str(detail["loc"][0]), detail["input"]
    if detail["type"] == _LONG_RUN_DIR:  # the socket's path was made from it
        name, value = "run_dir", detail["ctx"]["run_dir"]
    where = f" ({origins[name]})" if name in origins else ""
    if detail["type"] == "extra_forbidden":
        return f"{name}{where} is not a field: allowed are {', '.join(sorted(Config.model_fields))}"
    message = message[:1].lower() + message[1:]
    shown = str(value) if isinstance(value, Path) else value
    return f"{name} is {shown!r}{where}: {message} [{Config.model_fields[name].description}]"
