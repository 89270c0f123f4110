from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvtier_vllm.checks import refuse_unserved, require_recompute
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

from kvtier.errors import ConfigError

SPEC = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}


def _config(**changes: Any) -> tuple[Any, Any]:
    parallel = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 4,
    }
    cache = {"cache_dtype": "auto", "calculate_kv_scales": False, "kv_cache_dtype_skip_layers": []}
    groups = changes.pop("groups", [KVCacheGroupSpec(["a"], FullAttentionSpec(**SPEC))])
    speculative = changes.pop("speculative", None)
    for values in (parallel, cache):
        values.update({name: value for name, value in changes.items() if name in values})
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(**cache),
        speculative_config=speculative and SimpleNamespace(method=speculative),
    )
    return vllm_config, SimpleNamespace(kv_cache_groups=groups)


def test_a_plain_engine_and_its_data_parallel_replicas_are_served() -> None:
    refuse_unserved(*_config())
    refuse_unserved(*_config(speculative="ngram"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        ({"groups": []}, "0 KV cache groups"),
        ({"groups": [KVCacheGroupSpec(["a"], FullAttentionSpec(**SPEC))] * 2}, "2 KV cache groups"),
        (
            {"groups": [KVCacheGroupSpec(["a"], SlidingWindowSpec(**SPEC, sliding_window=64))]},
            "full attention",
        ),
        ({"groups": [KVCacheGroupSpec(["a"], FullAttentionSpec(**SPEC, sliding_window=64))]}, "window is 64"),
        ({"groups": [KVCacheGroupSpec(["a"], FullAttentionSpec(**SPEC, non_causal=True))]}, "causal"),
        ({"cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "kv_cache_dtype_skip_layers"),
        ({"speculative": "eagle"}, "'eagle'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_unserved(*_config(**changes))


def _transfer(policy: str) -> Any:
    return KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_the_policy_becomes_recompute(policy: str) -> None:
    config = SimpleNamespace(kv_transfer_config=_transfer(policy))
    require_recompute(config)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_the_policy_of_a_multi_connector_around_it_becomes_recompute_too() -> None:
    class MultiConnector:
        def __init__(self, vllm_config: Any) -> None:
            child = SimpleNamespace(kv_transfer_config=_transfer("fail"))
            require_recompute(child)

    outer = SimpleNamespace(kv_transfer_config=_transfer("fail"))
    MultiConnector(outer)
    assert outer.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_a_policy_that_is_not_known_is_refused() -> None:
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_load_failure_policy="ignore"))
    with pytest.raises(ConfigError, match="'ignore'"):
        require_recompute(config)
