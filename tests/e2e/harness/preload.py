"""Imported once by the fork server, so that an engine starts in seconds instead of tens of them.

No engine, no thread and no parallel region may come into being here: children are forked from it.
"""

import gc
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: F401
import transformers  # noqa: F401
import vllm.entrypoints.llm
import vllm.model_executor.models.llama
import vllm.model_executor.models.mistral
import vllm.model_executor.models.qwen2
import vllm.model_executor.models.qwen3
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401

import inferscale.connector.connector  # noqa: F401

gc.collect()
gc.freeze()  # vLLM collects garbage several times while it starts; what is loaded here is none
