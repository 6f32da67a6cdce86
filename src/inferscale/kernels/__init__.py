"""Moving KV between the pool and vLLM's paged cache. `reference` is plain torch and runs anywhere."""
