"""InferScale: long-term memory for self-hosted LLMs, injected as KV instead of prefilled as text."""
