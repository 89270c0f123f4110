"""The vLLM KV connector of kvtier; vLLM finds it by its entry point."""

from __future__ import annotations


def register() -> None:
    """Make `"kv_connector": "KVTierConnector"` known to this process. vLLM calls it in each process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVTierConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KVTierConnector", "kvtier_vllm.connector", "KVTierConnector"
        )
