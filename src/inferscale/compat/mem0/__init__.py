"""Mem0's interface: `from inferscale.compat.mem0 import Memory` in place of `from mem0 import Memory`.

The verbs, arguments and results are those of Mem0 2.x; docs/mem0.md says where it differs. `mem0ai` is not
needed.
"""

from inferscale.compat.mem0.async_memory import AsyncMemory
from inferscale.compat.mem0.memory import Memory

__all__ = ["AsyncMemory", "Memory"]
