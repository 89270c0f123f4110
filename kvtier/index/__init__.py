"""Where nodes tell each other what they hold: Redis or Valkey, one server, sentinels, or a Cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from redis.credentials import CredentialProvider

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.index.address import parse_address
from kvtier.index.embedded import EmbeddedIndex
from kvtier.index.redis import RedisIndex
from kvtier.interfaces import Index

MAX_PASSWORD_BYTES: Final = 4096


class Credentials(CredentialProvider):
    """User and password; a file is read anew with each connection, so that it can be replaced."""

    def __init__(self, user: str, password: str, password_file: Path | None) -> None:
        self._user = user
        self._password = password
        self._password_file = password_file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """For redis-py; raises `ConfigError` where the file cannot be read."""
        password = self._password
        if self._password_file is not None:
            password = read_password(self._password_file)
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same: the file is tiny."""
        return self.get_credentials()


def read_password(path: Path) -> str:
    """The password in a file, without the line's end; raises `ConfigError`, which does not show it."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_PASSWORD_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"index_password_file is {path}: it cannot be read ({error.strerror})") from None
    password = raw.rstrip(b"\r\n")
    if not password or len(raw) > MAX_PASSWORD_BYTES or b"\n" in password:
        raise ConfigError(
            f"index_password_file is {path}: allowed is one line of at most {MAX_PASSWORD_BYTES} bytes"
        )
    try:
        return password.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"index_password_file is {path}: its content is not UTF-8") from None


def open_index(config: Config) -> Index:
    """The index that the configuration names, still closed.

    Raises
    ------
    ConfigError
        The address, the file of the password or that of the CA can never work; or it is ``none``.
    """
    if config.has_no_index:
        raise ConfigError("index is 'none': this node uses no index")
    if not config.index.strip():
        return EmbeddedIndex(config)
    address = parse_address(config.index)
    if config.index_ca_file is not None and not config.index_ca_file.is_file():
        raise ConfigError(f"index_ca_file is {config.index_ca_file}: there is no such file")
    user = config.index_user or address.user
    password = config.index_password.get_secret_value() or address.password
    if config.index_password_file is not None:
        read_password(config.index_password_file)
    if not (user or password or config.index_password_file):
        return RedisIndex(address, config)
    return RedisIndex(address, config, Credentials(user, password, config.index_password_file))
