"""Memory behind vLLM's API server: `--middleware inferscale.server.MemoryMiddleware`."""

from inferscale.server.middleware import MemoryMiddleware

__all__ = ["MemoryMiddleware"]
