"""Starts the engine for a command: quietly, and with errors that name what was given."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from inferscale.cli.output import rate_text, say
from inferscale.config import MemoryConfig
from inferscale.errors import EngineError, EngineMissing, InferScaleError

if TYPE_CHECKING:
    from inferscale.memory_llm import EncodeProgress, MemoryLLM

_ALLOWED_MODELS = (
    "Give a folder with config.json, weights and tokenizer, or the name of a model on a Hugging Face hub "
    "that can be reached, such as HuggingFaceTB/SmolLM2-135M-Instruct."
)
_REASON_CHARS = 300
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def prepare_engine(*, verbose: bool) -> None:
    """Keep stdout for data: vLLM logs to stderr, and only errors unless asked for.

    Goes before the first import of torch and vLLM. One process is enough for one user, and starts
    four times faster; an explicit setting wins.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # On a CPU, vLLM would otherwise reserve nearly all memory; ignored on a GPU. In GiB.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    if verbose:
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes that vLLM and torch start
    warnings.filterwarnings("ignore")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it speaks before it reads its level


def model_path(model: str | None) -> str:
    """The given model, or the demo model, fetched on first use.

    Raises EngineMissing for what is neither a folder with a model nor could be a hub name.
    """
    if model is None:
        from inferscale.models import ensure_demo_model

        return str(ensure_demo_model(say))
    folder = Path(model)
    if not folder.is_dir() and _HUB_NAME.fullmatch(model):
        return model
    if not (folder / "config.json").is_file():
        what = "holds no config.json" if folder.is_dir() else "is not a folder"
        raise EngineMissing(f"--model is {model!r}, which {what}. {_ALLOWED_MODELS}")
    return model


def open_llm(
    model: str | None,
    memory: MemoryConfig,
    pool_size_bytes: int | None,
    *,
    max_model_len: int | None,
    verbose: bool,
    enforce_eager: bool | None = None,
    repair: bool = True,
) -> MemoryLLM:
    """Start the engine with the given model or the demo model.

    pool_size_bytes: None leaves the size to the engine, see `budget`.
    enforce_eager: default: on a CPU, where compiling takes longer than most sessions last and gains
    a few percent. What transformers and vLLM raise for a model or setting becomes an EngineError.
    """
    prepare_engine(verbose=verbose)
    path = model_path(model)
    say(f"Starting the engine with {Path(path).name} …")
    import torch

    from inferscale.memory_llm import MemoryLLM

    if enforce_eager is None:
        enforce_eager = not torch.cuda.is_available()
    arguments: dict[str, Any] = {"enforce_eager": enforce_eager, "use_tqdm_on_load": verbose}
    if max_model_len is not None:
        arguments["max_model_len"] = max_model_len
    with start_errors(path):
        llm = MemoryLLM(
            path,
            memory,
            pool_size_bytes=pool_size_bytes,
            repair_after_chat=repair,
            engine_args=arguments,
        )
    if llm.verdict.is_new or llm.verdict.is_refusal:
        say(str(llm.verdict))
    return llm


@contextmanager
def start_errors(path: str) -> Iterator[None]:
    """What transformers and vLLM raise for a model or a setting, as an EngineError."""
    try:
        yield
    except InferScaleError:
        raise
    except OSError as error:
        raise EngineMissing(
            f"The model {path!r} cannot be loaded: {_reason(error)} {_ALLOWED_MODELS}"
        ) from error
    except ValueError as error:
        raise EngineError(
            f"vLLM refuses the model {path!r} or a setting: {_reason(error)} Change --model or "
            "--max-model-len; --verbose shows the engine's log."
        ) from error


def _reason(error: Exception) -> str:
    return shorten(str(error), _REASON_CHARS, placeholder=" …").rstrip(".") + "."


def say_budget(llm: MemoryLLM) -> None:
    """How the memory is divided; on stderr."""
    say(str(llm.engine.budget()))


def show_progress(state: EncodeProgress) -> None:
    say(
        f"  encoded {state.done_jobs}/{state.jobs} passes, "
        f"{state.computed_tokens / max(state.seconds, 1e-9):.0f} tokens/s, "
        f"{rate_text(state.stored_facts_per_s)} facts/s"
    )
