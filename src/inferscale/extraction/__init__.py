"""Conversations become facts, and facts change those that are there (docs/lifecycle.md).

`Memory(…, extraction=model)` takes any `ExtractionModel`; `OpenAIModel` is one over HTTP. `MemoryLLM` and the
server bring their own, over the engine that they have.
"""

from inferscale.extraction.infer import Inference
from inferscale.extraction.llm import ExtractionModel, read_object, with_schema
from inferscale.extraction.openai_model import OpenAIModel
from inferscale.extraction.prompts import Prompts

__all__ = ["ExtractionModel", "Inference", "OpenAIModel", "Prompts", "read_object", "with_schema"]
