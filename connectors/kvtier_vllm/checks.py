"""What the connector does not serve: refused at start by name, or bypassed request by request."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any, Final

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvtier.errors import ConfigError
from kvtier_vllm.layout import kv_dtype

logger = logging.getLogger("vllm.kvtier")

_DRAFTS_WITHOUT_KV: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Ways of speculative decoding that keep no KV of their own."""


def refuse_unserved(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `ConfigError` for an engine whose KV kvtier cannot keep right."""
    _refuse_parallel(vllm_config.parallel_config)
    _refuse_groups(kv_cache_config)
    _refuse_cache(vllm_config, kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTS_WITHOUT_KV:
        raise ConfigError(
            f"kvtier does not serve speculative decoding with {speculative.method!r}: the draft's KV depends "
            "on a token beyond the block. Use ngram or suffix, or take kvtier out of kv_transfer_config"
        )


def _refuse_parallel(parallel: Any) -> None:
    for name, what in (
        ("tensor_parallel_size", "tensor parallelism"),
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(
                f"kvtier does not serve {what} yet: {name} is {size}, allowed is 1 (data parallel replicas "
                "of one worker each are served)"
            )


def _refuse_groups(kv_cache_config: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
    if len(groups) != 1:
        raise ConfigError(
            f"kvtier does not serve hybrid KV caches yet: this model has {len(groups)} KV cache groups "
            f"({kinds or 'none'}), allowed is one group of full attention"
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec):
        raise ConfigError(f"kvtier serves full attention only, this model's KV cache is a {kinds}")
    window = spec.sliding_window or spec.attention_chunk_size
    if window:
        raise ConfigError(
            f"kvtier does not serve sliding-window or chunked attention yet: this model's window is {window}"
        )
    if spec.non_causal:
        raise ConfigError("kvtier serves causal attention only: a block's KV must depend on its prefix alone")
    if spec.tokens_per_state != 1:
        raise ConfigError("kvtier does not serve compressed KV caches (several tokens in one state) yet")
    if getattr(groups[0], "is_eagle_group", False):
        raise ConfigError("kvtier does not serve draft layers in the model's KV cache group yet")


def _refuse_cache(vllm_config: Any, spec: Any) -> None:
    cache = vllm_config.cache_config
    kv_dtype(cache.cache_dtype, spec)
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "kvtier does not serve calculate_kv_scales: scales found at run time are in no key; use the "
            "checkpoint's scales"
        )
    if getattr(cache, "kv_cache_dtype_skip_layers", None):
        raise ConfigError("kvtier does not serve kv_cache_dtype_skip_layers: all layers must be of one type")


def require_recompute(vllm_config: Any) -> None:
    """Make vLLM recompute what kvtier fails to load; the scheduler reads the policy after this.

    A user who left it alone and one who wrote "fail" look the same, and neither wants an error from a
    cache: both get "recompute", and a line in the log.
    """
    for config in (vllm_config.kv_transfer_config, *_enclosing_configs()):
        policy = config.kv_load_failure_policy
        if policy == "fail":
            config.kv_load_failure_policy = "recompute"
            logger.info(
                "kvtier: kv_load_failure_policy is now 'recompute', what cannot be loaded is computed"
            )
        elif policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy is {policy!r}: kvtier needs 'recompute', or failed loads are errors"
            )


def _enclosing_configs() -> Iterator[Any]:
    """The configs of the `MultiConnector`s that are making this connector.

    They hand their children a config of their own, while the scheduler reads theirs, so they are found
    on the stack.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and type(owner).__name__ == "MultiConnector":
            yield frame.f_locals["vllm_config"].kv_transfer_config
        frame = frame.f_back


def beyond_tokens(request: Any) -> str:
    """What the KV of a request depends on beyond its tokens and salt, empty where it is nothing."""
    if request.lora_request is not None:
        return "a LoRA adapter"
    if request.mm_features:
        return "multimodal input"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt embeddings"
    if request.resumable:
        return "a prompt that grows while it runs"
    return ""
