"""Engines of other shapes: too few blocks, adapters, no daemon, and those that are refused at start."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.daemon import Daemon
from tests.connectors.engine import Engine, EngineFailed
from tests.connectors.models import CONFIG, write_config, write_lora
from tests.connectors.test_engine import prompt

pytestmark = pytest.mark.slow

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 10000.0,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_preempted_requests_answer_as_undisturbed_ones(
    make_engine: Callable[..., Engine], daemon: Daemon
) -> None:
    prompts = [prompt(100 + index, 78) for index in range(4)]
    # One after the other there is room: nothing is preempted.
    tight = make_engine({"socket": daemon.socket}, num_gpu_blocks_override=17, max_model_len=512)
    tight.ask("count_preemptions")
    undisturbed = [tight.one(tokens, max_tokens=120, salt=f"{n}") for n, tokens in enumerate(prompts)]
    assert tight.ask("preemptions") == 0
    for _ in range(2):  # the second time from the node
        disturbed = tight.generate(*prompts, max_tokens=120)
        assert all(one.agrees(other) for one, other in zip(disturbed, undisturbed, strict=True))
        tight.drop_own_cache()
    assert tight.ask("preemptions") >= 2
    counters = tight.counters()
    assert counters["loaded_blocks"] > 0
    assert (counters["usage"], counters["saving"], counters["tracked"]) == (0, 0, 0)
    tight.close()


def test_scheduler_and_worker_in_processes_of_their_own(
    make_engine: Callable[..., Engine], daemon: Daemon
) -> None:
    engine = make_engine({"socket": daemon.socket}, processes=True, distributed_executor_backend="mp")
    tokens = prompt(90)
    before = daemon.blocks()
    cold = engine.one(tokens)
    daemon.wait_for_blocks(before + 9)
    # Saved, but vLLM may still be waiting for the worker's report of it.
    until(lambda: engine.ask("reset", connector=False))
    loaded = engine.one(tokens)
    assert (cold.cached, loaded.cached) == (0, 288)
    assert loaded.agrees(cold)
    engine.ask("rpc", method="reload_weights", args=[])
    until(lambda: engine.ask("reset", connector=False))
    assert engine.one(tokens).cached == 0
    engine.ask("rpc", method="kvtier_set_revision", args=["step-1"])
    until(lambda: engine.ask("reset", connector=False))
    engine.one(prompt(91))
    until(lambda: engine.ask("reset", connector=False))
    engine.one(tokens)
    daemon.wait_for_blocks(before + 18)
    until(lambda: engine.ask("reset", connector=False))
    again = engine.one(tokens)
    assert again.cached == 288
    assert again.agrees(cold)
    engine.close()


def test_adapters_pass_by(make_engine: Callable[..., Engine], daemon: Daemon, home: Path) -> None:
    adapter = str(write_lora(home / "adapter"))
    engine = make_engine({"socket": daemon.socket}, enable_lora=True, max_loras=1, max_lora_rank=8)
    tokens = prompt(110)
    base = engine.one(tokens)
    engine.drop_own_cache()
    before = daemon.blocks()
    adapted = engine.one(tokens, lora=adapter)
    engine.drop_own_cache()
    again = engine.one(tokens, lora=adapter)
    assert adapted.text == again.text != base.text
    assert (adapted.cached, again.cached) == (0, 0)
    engine.drop_own_cache()
    loaded = engine.one(tokens)
    assert (loaded.text, loaded.cached) == (base.text, 288)
    assert daemon.blocks() == before
    assert engine.counters()["bypassed"] == {"a LoRA adapter": 2}
    assert engine.log.read_text().count("with a LoRA adapter are not cached") == 1
    engine.close()


def test_without_a_daemon_the_engine_works_and_uses_one_that_comes(
    make_engine: Callable[..., Engine], daemon: Daemon
) -> None:
    daemon.stop()
    engine = make_engine({"socket": daemon.socket})
    tokens = prompt(120)
    cold = engine.one(tokens)
    engine.drop_own_cache()
    again = engine.one(tokens)
    assert (cold.text, cold.cached) == (again.text, again.cached)
    daemon.start()
    for _ in range(100):
        engine.drop_own_cache()
        loaded = engine.one(tokens)
        assert loaded.text == cold.text
        if loaded.cached:
            break
    assert loaded.cached == 288
    engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "enable_prefix_caching": False},
        {
            "block_size": 64,
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
            },
        },
    ],
    ids=["fp8-without-own-cache", "ngram"],
)
def test_other_engines_that_are_served(
    make_engine: Callable[..., Engine], daemon: Daemon, options: dict[str, Any]
) -> None:
    engine = make_engine({"socket": daemon.socket}, **options)
    tokens = prompt(130, 32 * 9 + 5)
    before = daemon.blocks()
    cold = engine.one(tokens)
    cached = len(tokens) // (block := options.get("block_size", 32)) * block
    daemon.wait_for_blocks(before + cached // block)
    engine.drop_own_cache()
    loaded = engine.one(tokens)
    assert (cold.cached, loaded.cached) == (0, cached)
    assert loaded.agrees(cold)
    engine.ask("drain")
    assert engine.counters()["saving"] == 0
    engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [(GEMMA, "hybrid KV caches"), (MISTRAL, "kvtier serves full attention only")],
    ids=["hybrid", "sliding-window"],
)
def test_what_is_not_served_is_refused_at_start(
    make_engine: Callable[..., Engine],
    home: Path,
    request: pytest.FixtureRequest,
    changes: dict[str, Any],
    message: str,
) -> None:
    model = write_config(home / f"refused-{request.node.callspec.id}", **(CONFIG | changes))
    with pytest.raises(EngineFailed) as caught:
        make_engine({"revision": "test"}, model=model, load_format="dummy")
    assert "ConfigError" in str(caught.value)
    assert message in str(caught.value)
