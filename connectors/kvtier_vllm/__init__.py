"""The vLLM KV connector of kvtier; vLLM finds it by its entry point.

``{"kv_connector": "KVTierConnector", "kv_role": "kv_both"}`` is all that a user has to write; see
`settings.py` for what can be said beyond it.
"""

from __future__ import annotations


def register() -> None:
    """Make `"kv_connector": "KVTierConnector"` known to this process. vLLM calls it in each process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvtier_vllm import weights

    if "KVTierConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVTierConnector", "kvtier_vllm.connector", "KVTierConnector")
    weights.install_hooks()
