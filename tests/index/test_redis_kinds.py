"""`IndexTests` on every kind of server that a URL can name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.index.address import Address
from kvtier.index.embedded import SOCKET_NAME, EmbeddedIndex
from kvtier.index.redis import RedisIndex
from kvtier.testing.index_tests import IndexTests, MakeIndex
from tests.index.conftest import MakeConfig, index_maker
from tests.index.servers import MASTER, PASSWORD, USER, Server


class TestEmbeddedValkey(IndexTests):
    @pytest.fixture
    async def make_index(self, make_config: MakeConfig):
        """One of them has the server, the others are further views of it."""
        owner = EmbeddedIndex(make_config())
        await owner.open()

        def make(*, ttl_s: float = 3600.0, dead_after_s: float = 15.0) -> RedisIndex:
            config = make_config(index_ttl_s=ttl_s, dead_after_s=dead_after_s)
            return RedisIndex(Address("socket", path=config.run_dir / SOCKET_NAME), config)

        yield make
        await owner.close()


class TestDebianRedis(IndexTests):
    @pytest.fixture
    def make_index(self, debian: Server, make_config: MakeConfig) -> MakeIndex:
        return index_maker(make_config, index=f"{debian.url}/3")


@pytest.mark.slow
class TestCluster(IndexTests):
    @pytest.fixture
    def make_index(self, cluster: list[Server], make_config: MakeConfig) -> MakeIndex:
        seeds = ",".join(f"127.0.0.1:{server.port}" for server in cluster[:2])
        return index_maker(make_config, index=f"redis+cluster://{seeds}")


@pytest.mark.slow
class TestSecuredRedis(IndexTests):
    @pytest.fixture
    def make_index(self, secured: tuple[Server, Path], make_config: MakeConfig, tmp_path: Path) -> MakeIndex:
        server, ca_file = secured
        password_file = tmp_path / "password"
        password_file.write_text(PASSWORD + "\n")
        return index_maker(
            make_config,
            index=f"rediss://127.0.0.1:{server.port}",
            index_user=USER,
            index_password_file=password_file,
            index_ca_file=ca_file,
        )


@pytest.mark.slow
class TestSentinel(IndexTests):
    @pytest.fixture
    def make_index(self, watched: tuple[list[Server], list[Server]], make_config: MakeConfig) -> MakeIndex:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in watched[1])
        return index_maker(make_config, index=f"redis+sentinel://{hosts}/{MASTER}")
