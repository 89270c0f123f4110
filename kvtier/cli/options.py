"""Options of the command line: those of the daemon are made from `Config`, so that none is missing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer
from pydantic import SecretStr
from pydantic_core import PydanticUndefined
from rich.markup import escape

from kvtier.cli import output
from kvtier.client import AdminClient
from kvtier.config import Config
from kvtier.errors import AlreadyRunning, ConfigError, DeadlineExceeded, KvtierError, Unavailable

_PASSWORD_IN_URL: Final = re.compile(r"://.*:.*@", re.DOTALL)

DAEMON_TIMEOUT_S: Final = 5.0

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with any of the daemon's options. (env KVTIER_CONFIG)"),
]
Socket = Annotated[
    str | None, typer.Option("--socket", help="Unix socket of the daemon. (env KVTIER_SOCKET)")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of tables.")]


@contextmanager
def daemon(config: Path | None, socket: str | None) -> Iterator[AdminClient]:
    """A client of the daemon that is meant; raises `ConfigError`, and in the block what the client raises."""
    path = Config.load(config, socket=socket).socket
    waiting = f"waiting for the daemon on {path} to answer, {DAEMON_TIMEOUT_S:g} s at most for each question"
    with AdminClient(path, timeout_s=DAEMON_TIMEOUT_S) as client:
        try:
            with output.patience(waiting):
                yield client
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"the daemon on {path} does not answer: {error}") from error
        except Unavailable as error:
            if is_listened_on(path):
                raise Unavailable(
                    f"the daemon on {path} is busy: it takes no more connections or calls ({error}); "
                    "try again, and see who has so many open"
                ) from error
            why = f" ({error})" if path.exists() else ""
            raise Unavailable(
                f"no daemon on {path}{why}: start it with `kvtier serve`, or name its socket with --socket"
            ) from error


def is_listened_on(path: Path) -> bool:
    """Whether a process listens on this socket, whatever it answers."""
    from kvtier.server.app import is_stale_socket  # heavy, and needed only where something is wrong

    try:
        is_stale_socket(path)
    except AlreadyRunning:
        return True
    except (KvtierError, OSError):
        return False
    return False


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(**values)` one option for each field of `Config`, all of them None unless given.

    Secrets have none: every user of the machine sees command lines. Texts go to `Config.load` as they are:
    it alone judges values, whichever source they come from. `command`'s own parameters, which have to be
    named, come first.
    """
    own = [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    hints = get_type_hints(command, include_extras=True)
    parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
    parameters += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_type(name), _option(name)],
        )
        for name in Config.model_fields
        if Config.model_fields[name].annotation is not SecretStr
    ]

    def wrapper(**values: Any) -> None:
        if _PASSWORD_IN_URL.search(values.get("index") or ""):
            raise ConfigError(
                "index has a password, and every user of this machine sees command lines: leave it out, "
                "and set KVTIER_INDEX_PASSWORD or --index-password-file"
            )
        command(**values)

    wrapper.__name__ = command.__name__
    wrapper.__doc__ = command.__doc__
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _type(name: str) -> Any:
    return bool | None if Config.model_fields[name].annotation is bool else str | None


def _option(name: str) -> Any:
    field = Config.model_fields[name]
    description = (field.description or "").rstrip(".")
    default = (
        "" if field.default in (PydanticUndefined, None, "") else f"; default: {_text(name, field.default)}"
    )
    is_flag = field.annotation is bool
    option = name.replace("_", "-")
    return typer.Option(
        f"--{option}/--no-{option}" if is_flag else f"--{option}",
        help=f"{escape(description[:1].upper() + description[1:])}. (env KVTIER_{name.upper()}{default})",
        show_default=False,
        metavar=None if is_flag else "TEXT",
    )


def _text(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int) and value and value % (1 << 20) == 0:
        return f"{value >> 20}MiB"
    return str(value)
