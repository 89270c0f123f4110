"""A vLLM API server on CPU and a client that times it.

The server listens on a Unix socket in a private directory: no port to clash with, nothing that others on
the machine could reach.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from kvtier.demo.model import cache_directory
from kvtier.demo.processes import DemoFailed, Supervised
from kvtier.errors import ResourceShortage

BLOCK_TOKENS: Final = 32
MAX_MODEL_TOKENS: Final = 8192
START_TIMEOUT_S: Final = 600.0
"""A minute on a quiet machine, of which the first start compiles the model; many times that on a busy one."""
REQUEST_TIMEOUT_S: Final = 180.0
RESET_TIMEOUT_S: Final = 10.0
_MODEL: Final = "demo"


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished completion.

    Attributes
    ----------
    ttft_s, total_s
        From just before the request is sent until its first text has arrived, and until its end.
    prompt_tokens, cached_tokens
        As the engine counts them; `cached_tokens` includes what a connector promised to load.
    """

    text: str
    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def require_vllm() -> None:
    """Raise `ResourceShortage` where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ResourceShortage(
            "vLLM is not installed: pip install 'kvtier[vllm]' (or `make install` in a checkout)"
        )


class Engine:
    """A vLLM API server, from construction until its process is stopped; a context manager.

    Parameters
    ----------
    directory
        Private and short (a Unix socket's path has at most 107 bytes); the caller removes it.
    kvtier_socket
        Daemon to connect to; None: no connector at all.
    connector
        Settings of the connector beyond the socket (``kv_connector_extra_config``).
    options
        Further command line options of vLLM.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        directory: Path,
        *,
        kvtier_socket: Path | None = None,
        connector: Mapping[str, object] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        require_vllm()
        self.name = name
        directory.mkdir(mode=0o700)
        self._socket = directory / "api.sock"
        command = _command(model, self._socket, options)
        if kvtier_socket is not None:
            command += ["--kv-transfer-config", _transfer_config(kvtier_socket, connector or {})]
        started = time.monotonic()
        self.process = Supervised(
            name,
            command,
            log=directory / "log",
            environment=_environment(directory),
            grace_s=15.0,
        )
        self._started = started
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self._socket)),
            base_url="http://engine",
            timeout=REQUEST_TIMEOUT_S,
        )

    def wait_ready(self) -> float:
        """Wait until it serves; the seconds since its start. Raises `DemoFailed`."""
        self.process.wait_until(self._healthy, timeout_s=START_TIMEOUT_S)
        return time.monotonic() - self._started

    def _healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def tokenize(self, text: str) -> list[int]:
        """The token ids of `text`, without special tokens."""
        body = {"model": _MODEL, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own cache and leave the connector alone; waits while blocks are in use."""
        deadline = time.monotonic() + RESET_TIMEOUT_S
        while not self._post("/reset_prefix_cache", None)["success"]:
            if time.monotonic() > deadline:
                raise DemoFailed(f"{self.name} did not empty its cache within {RESET_TIMEOUT_S:.0f} s")
            time.sleep(0.02)

    def complete(self, prompt: Sequence[int], *, max_tokens: int) -> Answer:
        """Greedy completion of a prompt of token ids, streamed and timed."""
        started = time.perf_counter()
        first = 0.0
        text = ""
        usage: dict[str, Any] = {}
        with self.stream(prompt, max_tokens=max_tokens) as chunks:
            for chunk in chunks:
                if chunk["choices"]:
                    first = first or time.perf_counter() - started
                    text += chunk["choices"][0]["text"]
                usage = chunk.get("usage") or usage
        total = time.perf_counter() - started
        if not first or not usage:
            raise DemoFailed(f"{self.name} ended a completion without an answer\n{self.process.tail()}")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            text=text,
            ttft_s=first,
            total_s=total,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            completion_tokens=usage["completion_tokens"],
        )

    @contextmanager
    def stream(self, prompt: Sequence[int], *, max_tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
        """The chunks of a greedy completion as they arrive; leaving early aborts the request."""
        body = {
            "model": _MODEL,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise DemoFailed(
                        f"{self.name} answered {response.status_code}: {response.read().decode()}"
                    )
                yield _events(response)
        except httpx.HTTPError as error:
            raise DemoFailed(f"{self.name} broke off: {error!r}\n{self.process.tail()}") from error

    def _post(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            response = self._http.post(path, json=body)
            response.raise_for_status()
            answer: dict[str, Any] = response.json()
        except httpx.HTTPError as error:
            raise DemoFailed(f"{self.name}: POST {path}: {error!r}\n{self.process.tail()}") from error
        return answer

    def stop(self) -> None:
        """End the server in order; idempotent."""
        self._http.close()
        self.process.stop()

    def kill(self) -> None:
        """End the server as a crash would."""
        self._http.close()
        self.process.kill()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _command(model: Path, socket: Path, options: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", _MODEL, "--dtype", "bfloat16"),
        *("--max-model-len", str(MAX_MODEL_TOKENS), "--block-size", str(BLOCK_TOKENS)),
        *("--uds", str(socket), "--enable-prompt-tokens-details", "--uvicorn-log-level", "warning"),
        *options,
    ]


def _transfer_config(socket: Path, connector: Mapping[str, object]) -> str:
    return json.dumps(
        {
            "kv_connector": "KVTierConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"socket": str(socket), **connector},
        }
    )


def _environment(directory: Path) -> Mapping[str, str]:
    """The same in every arm: with automatic binding a connector would change the number of threads."""
    cpus = sorted(os.sched_getaffinity(0))
    temporary = directory / "tmp"
    temporary.mkdir()
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_RPC_BASE_PATH": str(temporary),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(temporary),
        # vLLM 0.32 on CPU cannot load what it compiled ahead of time, and would compile at every start;
        # without that step the compiler's own cache works.
        "VLLM_USE_AOT_COMPILE": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(cache_directory().parent / "inductor"),
    }
