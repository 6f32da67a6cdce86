"""Mem0's configuration, as far as it means something here → settings of ours."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from inferscale.config import MemoryConfig
from inferscale.config_checks import from_mapping
from inferscale.errors import InvalidConfig

if TYPE_CHECKING:
    from inferscale.extraction import OpenAIModel

_log = logging.getLogger(__name__)
_SECTIONS = (
    "vector_store",
    "llm",
    "graph_store",
    "history_db_path",
    "reranker",
    "version",
    "custom_instructions",
    "custom_fact_extraction_prompt",
    "custom_update_memory_prompt",
)
_DEFAULT_URLS = {"vllm": "http://localhost:8000/v1", "lmstudio": "http://localhost:1234/v1", "openai": None}
"""Of providers with OpenAI's interface, as Mem0 has them. None: of a server that is named only."""


class Settings(NamedTuple):
    config: MemoryConfig
    extraction: OpenAIModel | None


def read_settings(config_dict: Mapping[str, Any]) -> Settings:
    """Fields of `MemoryConfig`, with or without Mem0's sections. Raises InvalidConfig for others."""
    if not isinstance(config_dict, Mapping):
        raise InvalidConfig(f"config_dict is a {type(config_dict).__name__}; allowed is a dict.")
    settings = {name: value for name, value in config_dict.items() if name not in _SECTIONS}
    unused = [name for name in _SECTIONS if config_dict.get(name) is not None]
    embedder = settings.get("embedder")
    if isinstance(embedder, Mapping):
        model = _config_of(embedder).get("model")
        if embedder.get("provider") == "huggingface" and model:
            settings["embedder"] = model
        else:
            del settings["embedder"]
            unused.append("embedder")
    extraction = _model_of(config_dict.get("llm"))
    if extraction is not None:
        unused.remove("llm")
    if unused:
        _log.warning("not used of Mem0's configuration: %s", ", ".join(unused))
    return Settings(from_mapping(MemoryConfig, settings, "config_dict"), extraction)


def _model_of(llm: object) -> OpenAIModel | None:
    """The model of Mem0's section `llm`; None for one that is reached in another way."""
    if not isinstance(llm, Mapping) or llm.get("provider") not in _DEFAULT_URLS:
        return None
    provider, config = str(llm["provider"]), _config_of(llm)
    base_url = config.get(f"{provider}_base_url") or _DEFAULT_URLS[provider]
    model = config.get("model")
    if not base_url or not model:
        return None
    from inferscale.extraction import OpenAIModel

    return OpenAIModel(str(base_url), str(model), api_key=config.get("api_key"))


def _config_of(section: Mapping[str, Any]) -> Mapping[str, Any]:
    config = section.get("config")
    return config if isinstance(config, Mapping) else {}
