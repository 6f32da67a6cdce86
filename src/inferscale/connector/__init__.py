"""The KV connector: loaded by vLLM through `kv_connector_module_path`, no engine change.

`connector` is the façade, `scheduler` and `worker` its two sides, `messages` what they exchange,
`layout` the start-up probe, `locate` the matching of segments, `residency` the planner's channel,
`secret`, `folder_lock` and `refusal` what else lies in the runtime folder, `compat` the only place that
knows vLLM versions.
"""

from typing import Any

__all__ = ["InferScaleConnector"]


def __getattr__(name: str) -> Any:
    if name == "InferScaleConnector":
        from inferscale.connector.connector import InferScaleConnector

        return InferScaleConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
