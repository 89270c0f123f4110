"""A real vLLM engine in a process of its own, driven by the tests through a pipe.

As a module it is the process: it reads one JSON command a line and answers with one JSON line on the
descriptor it was given (vLLM writes to stdout). `Engine` is the test's end of the pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
BLOCK_TOKENS = 32
PATIENT = {"lookup_timeout_s": 1.0, "load_floor_s": 2.0}
"""Deadlines that a crowded machine keeps: what is late would be a miss, as it should."""


@dataclass(frozen=True)
class Answer:
    """What the engine generated for one prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int

    @property
    def text(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return self.tokens, self.logprobs

    def agrees(self, other: Answer) -> bool:
        """Equal but for the order of sums, which depends on what is computed in the same step."""
        drift = (abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))
        return self.tokens == other.tokens and max(drift) < 1e-3


class EngineFailed(Exception):
    """The command raised in the engine's process; the message is its traceback."""


class Engine:
    """A vLLM engine with the connector, as scheduler and worker in one process or in one each."""

    def __init__(
        self,
        home: Path,
        model: Path,
        extra: dict[str, Any],
        /,
        *,
        processes: bool = False,
        **options: Any,
    ) -> None:
        self.log = home / f"vllm-{os.urandom(4).hex()}.log"
        read_fd, write_fd = os.pipe()
        environ = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
            "LD_PRELOAD": str(Path(sys.prefix) / "lib" / "libiomp5.so"),
            "OMP_NUM_THREADS": "2",
            "KMP_BLOCKTIME": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "TORCH_COMPILE_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.connectors.engine", str(write_fd)],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                pass_fds=[write_fd],
            )
        os.close(write_fd)
        self._replies = os.fdopen(read_fd)
        transfer = {"kv_connector": "KVTierConnector", "kv_role": "kv_both"}
        self.ask(
            "start",
            options={
                "model": str(model),
                "skip_tokenizer_init": True,
                "max_model_len": 1024,
                "block_size": BLOCK_TOKENS,
                "enforce_eager": True,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 256,
                "kv_cache_memory_bytes": 64 << 20,
                "seed": 0,
                "dtype": "float32",
                "kv_transfer_config": transfer | {"kv_connector_extra_config": PATIENT | extra},
            }
            | options,
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
            self.process.stdin.flush()
            line = self._replies.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineFailed(self.tail())
        reply = json.loads(line)
        if "error" in reply:
            raise EngineFailed(reply["error"])
        return reply["value"]

    def generate(self, *prompts: list[int], max_tokens: int = 8, **options: Any) -> list[Answer]:
        """All prompts at once; greedy."""
        answers = self.ask("generate", prompts=prompts, max_tokens=max_tokens, **options)
        return [Answer(tuple(t), tuple(p), c) for t, p, c in answers]

    def one(self, prompt: list[int], **options: Any) -> Answer:
        (answer,) = self.generate(prompt, **options)
        return answer

    def drop_own_cache(self, *, connector: bool = False) -> None:
        assert self.ask("reset", connector=connector) is True

    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = self.ask("counters")
        return counters

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._replies.close()


class Commands:
    """The engine's end. vLLM is imported here only."""

    def __init__(self) -> None:
        self.llm: Any = None

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def start(self, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        transfer = options.pop("kv_transfer_config")
        if "kv_events_config" in options:
            options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
        self.llm = LLM(**options, kv_transfer_config=KVTransferConfig(**transfer))

    def _sampling(self, max_tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=max_tokens, temperature=0, logprobs=1, detokenize=False, ignore_eos=True
        )

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str | None = None,
        lora: str | None = None,
    ) -> list[Any]:
        from vllm.lora.request import LoRARequest

        inputs = [{"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
        outputs = self.llm.generate(
            inputs,
            self._sampling(max_tokens),
            use_tqdm=False,
            lora_request=LoRARequest("adapter", 1, lora) if lora else None,
        )
        self.drain()
        return [
            [
                list(output.outputs[0].token_ids),
                [next(iter(step.values())).logprob for step in output.outputs[0].logprobs],
                output.num_cached_tokens,
            ]
            for output in outputs
        ]

    def drain(self) -> None:
        """Steps until nothing is left to do: saves and releases that vLLM still waits for included.

        A scheduler in a process of its own does that by itself.
        """
        if not hasattr(self.llm.llm_engine.engine_core, "engine_core"):
            return
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling(max_tokens))

    def step(self, count: int = 1) -> dict[str, str]:
        for _ in range(count):
            self.llm.llm_engine.step()
        return {name: request.status.name for name, request in self.scheduler.requests.items()}

    def abort(self, names: list[str]) -> None:
        self.llm.llm_engine.abort_request(names)

    def reset(self, connector: bool) -> bool:
        self.drain()
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def counters(self) -> dict[str, Any]:
        from dataclasses import asdict

        side = self.scheduler.connector.scheduler
        return asdict(side.counters) | {
            "usage": self.scheduler.kv_cache_manager.usage,
            "requests": len(self.scheduler.requests),
            "tracked": len(side._requests),
            "saving": side.save_book.blocks,
            "block_compute_s": side.prefill.block_compute_s(BLOCK_TOKENS),
            "recompute": self.scheduler.recompute_kv_load_failures,
        }

    def keys(self, prompt: list[int]) -> list[str]:
        """Of a prompt's whole blocks, as the engine asks for them now, in hex."""
        from kvtier.types import chain_keys

        side = self.scheduler.connector.scheduler
        root = side.eras.namespace(side._handshake, None).root()
        return [key.hex() for key in chain_keys(root, prompt, BLOCK_TOKENS)]

    def own_cache(self) -> int:
        """Different blocks that the engine itself could use again."""
        return len(self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)

    def followed(self) -> dict[str, Any] | None:
        """What was done with the engine's KV events, None where it publishes none."""
        from dataclasses import asdict

        follower = self.scheduler.connector.scheduler.follower
        if follower is None:
            return None
        return asdict(follower.reporter.counters) | {"unknown": follower.residents.unknown}

    def rpc(self, method: str, args: list[Any]) -> None:
        self.llm.collective_rpc(method, args=tuple(args))

    def preemptions(self) -> int:
        return int(self.seen_preemptions)

    def count_preemptions(self) -> None:
        """Count from now on."""
        self.seen_preemptions = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.seen_preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted


def _serve(replies: IO[str]) -> None:
    commands = Commands()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            reply = {"value": getattr(commands, name)(**arguments)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    if commands.llm is not None:
        commands.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as pipe:
        _serve(pipe)
