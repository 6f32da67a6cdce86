"""Remember a few things about one person and ask about them, with injected memory.

Run after `make setup`:  .venv/bin/python examples/offline_chat.py
"""

import os
import tempfile

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; ignored on a GPU

from inferscale import MemoryConfig, MemoryLLM, Turn
from inferscale.models import ensure_demo_model


def main() -> None:
    # Uncompiled, the engine starts in seconds; leave `enforce_eager` out to serve for long.
    arguments = {"max_model_len": 4096, "enforce_eager": True}
    with (
        tempfile.TemporaryDirectory() as folder,
        MemoryLLM(str(ensure_demo_model()), MemoryConfig(folder), engine_args=arguments) as llm,
    ):
        llm.add(
            [
                Turn("My sister Ingrid lives in Oslo.", "Ana", "3 May 2025"),
                Turn("I am allergic to walnuts.", "Ana", "3 May 2025"),
                Turn("My locker code at the gym is 4471.", "Ana", "9 May 2025"),
            ],
            user_id="ana",
        )
        for question in ("Where does my sister live?", "What is my locker code?"):
            result = llm.chat(question, user_id="ana", max_tokens=32)
            print(question, "→", result.text.strip())
            print(f"   {result.num_injected_tokens} tokens injected, {result.num_prefilled_tokens} prefilled")


if __name__ == "__main__":
    main()
