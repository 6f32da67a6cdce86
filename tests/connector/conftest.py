"""vLLM and the compiler's modules warn about themselves when they are imported: import them once, quietly."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.core.sched.async_scheduler  # noqa: F401
