"""Options that benchmarks share: which model and engine, which facts and questions, where rows go."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import click

from inferscale.bench.options import RandomTokens
from inferscale.cli.engine import model_path, prepare_engine, start_errors
from inferscale.cli.options import COUNT, POSITIVE, TAIL, read_size
from inferscale.cli.output import emit, say
from inferscale.config import DEFAULT_TAIL, EncodingConfig, InjectionPath, PoolDtype
from inferscale.errors import InvalidInput

if TYPE_CHECKING:
    from inferscale.bench.conversation import BenchConversation
    from inferscale.bench.engine import BenchEngine, EngineSpec
    from inferscale.bench.harness import Row
    from inferscale.bench.source import Need, Source
    from inferscale.windows import WindowPolicy

F = TypeVar("F", bound=Callable[..., Any])

_RANDOM = RandomTokens()
_ENCODING = EncodingConfig()
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class EngineChoice(NamedTuple):
    """The options of `engine_options`, as given."""

    model: str | None
    random_weights: str | None
    tokenizer: Path | None
    pool_size: int | None
    max_model_len: int | None
    enforce_eager: bool
    gpu_memory_utilization: float | None
    max_num_batched_tokens: int | None
    dtype: str | None
    injection_path: InjectionPath
    pool_dtype: PoolDtype
    engine_arg: tuple[str, ...]
    verbose: bool

    def spec(self) -> EngineSpec:
        """The engine's settings; nothing is started. Prepares this process for vLLM."""
        prepare_engine(verbose=self.verbose)
        from inferscale.bench.engine import EngineSpec
        from inferscale.bench.shapes import model_folder

        if self.random_weights is not None and self.model is not None:
            raise InvalidInput("--model and --random-weights were given; give one of them.")
        random = self.random_weights is not None
        path = str(model_folder(self.random_weights)) if self.random_weights else model_path(self.model)
        return EngineSpec(
            path,
            random_weights=random,
            tokenizer=None if self.tokenizer is None else str(self.tokenizer),
            pool_size_bytes=self.pool_size,
            max_model_len=self.max_model_len,
            enforce_eager=self.enforce_eager,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_num_batched_tokens=self.max_num_batched_tokens,
            dtype=self.dtype,
            injection_path=self.injection_path,
            pool_dtype=self.pool_dtype,
            extra=read_engine_args(self.engine_arg),
        )


class WorkloadChoice(NamedTuple):
    """The options of `workload_options`, as given."""

    conversation: Path | None
    number: int
    random_tokens: bool
    facts_per_user: int | None
    head_tokens: int
    question_tokens: int
    seed: int
    window: int
    stride: int
    mixed: int

    def policy(self) -> WindowPolicy:
        from inferscale.windows import WindowPolicy

        return WindowPolicy(self.window, self.stride, self.mixed, _ENCODING.neighbours)

    def read(self, engine: EngineChoice) -> BenchConversation | None:
        """The conversation; None for random token ids, which is the default with random weights."""
        from inferscale.bench.conversation import read_conversation

        if self.random_tokens and self.conversation is not None:
            raise InvalidInput("--conversation and --random-tokens were given; give one of them.")
        if self.random_tokens or (self.conversation is None and engine.random_weights is not None):
            return None
        if engine.random_weights is not None and engine.tokenizer is None:
            raise InvalidInput(
                "--conversation with --random-weights needs a tokenizer; give a folder with --tokenizer, or "
                "leave --conversation out for random token ids."
            )
        return read_conversation(self.conversation, self.number)

    def source(self, conversation: BenchConversation | None, spec: EngineSpec) -> Source:
        from inferscale.bench.source import RandomSource, SpokenSource

        if conversation is None:
            return RandomSource(
                RandomTokens(self.facts_per_user, self.head_tokens, self.question_tokens, self.seed)
            )
        return SpokenSource(conversation, spec.tokenizer or spec.model, self.facts_per_user)


@contextmanager
def start(spec: EngineSpec, source: Source, needs: Sequence[Need]) -> Iterator[BenchEngine]:
    """The engine, large enough for these needs; what its start raises becomes one line."""
    from inferscale.bench.source import sized

    with start_errors(spec.model):
        fitting = sized(spec, source, needs)
        say(f"Starting the engine with {spec.name} …")
        engine = fitting.open()
    with engine:
        yield engine


def pool_dtype_option(command: F) -> F:
    return click.option(
        "--pool-dtype",
        type=click.Choice(get_args(PoolDtype)),
        default="auto",
        show_default=True,
        help="How the pool keeps KV.",
    )(command)


def engine_options(command: F) -> F:
    """Options of the model and the engine; the command gets them as `engine: EngineChoice`."""
    options = (
        click.option(
            "--model",
            metavar="MODEL",
            help="Folder or hub name of the model. Default: SmolLM2-135M-Instruct.",
        ),
        click.option(
            "--random-weights",
            metavar="SHAPE",
            help="Random weights instead, for the shape llama-3.1-8b, mistral-7b-v0.3, qwen2.5-7b or "
            "qwen3-14b, or that of a config.json (its folder or path).",
        ),
        click.option(
            "--tokenizer",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            help="Folder of a tokenizer, for texts with random weights.",
        ),
        click.option(
            "--pool-size",
            metavar="SIZE",
            callback=read_size,
            help="Memory for the facts' KV, such as 512MiB or 2GB. Default: what the facts need.",
        ),
        click.option("--max-model-len", type=POSITIVE, help="Longest prompt and answer, in tokens."),
        click.option("--enforce-eager", is_flag=True, help="Run the model uncompiled."),
        click.option(
            "--gpu-memory-utilization",
            type=click.FloatRange(0, 1, min_open=True),
            help="vLLM's share of a GPU's memory. Default: what the pool leaves.",
        ),
        click.option("--max-num-batched-tokens", type=POSITIVE, help="Most tokens of one step."),
        click.option("--dtype", metavar="TYPE", help="Such as bfloat16. Default: the model's."),
        click.option(
            "--injection-path",
            type=click.Choice(get_args(InjectionPath)),
            default="auto",
            show_default=True,
            help="How KV is moved; fused refuses to start where its kernels cannot run.",
        ),
        pool_dtype_option,
        click.option(
            "--engine-arg",
            metavar="NAME=JSON",
            multiple=True,
            help="A further argument of vllm.LLM, such as max_num_seqs=512. May be repeated.",
        ),
        click.option("--verbose", is_flag=True, help="Show the engine's log."),
    )
    return _collected(command, options, "engine", EngineChoice)


def workload_options(command: F) -> F:
    """Options of facts and questions; the command gets them as `workload: WorkloadChoice`."""
    options = (
        conversation_options,
        click.option(
            "--random-tokens",
            is_flag=True,
            help="Random token ids instead of a conversation; always with --random-weights, unless "
            "--conversation is given.",
        ),
        click.option(
            "--facts-per-user",
            type=POSITIVE,
            help="Facts of each user. Default: a fifth more than k; all turns of a conversation.",
        ),
        click.option(
            "--head-tokens",
            type=POSITIVE,
            default=_RANDOM.head_tokens,
            show_default=True,
            help="Of random ids: tokens in front of all facts.",
        ),
        click.option(
            "--question-tokens",
            type=POSITIVE,
            default=_RANDOM.question_tokens,
            show_default=True,
            help="Of random ids: tokens of a question.",
        ),
        click.option("--seed", type=COUNT, default=_RANDOM.seed, show_default=True, help="Of random ids."),
        click.option(
            "--window",
            type=COUNT,
            default=_ENCODING.window,
            show_default=True,
            help="Facts in front of the captured ones of an encode pass.",
        ),
        click.option(
            "--stride",
            type=POSITIVE,
            default=_ENCODING.stride,
            show_default=True,
            help="Facts that one encode pass captures.",
        ),
        click.option(
            "--mixed",
            type=COUNT,
            default=_ENCODING.mixed,
            show_default=True,
            help="Facts of one mixed pass, for half as many facts or more; 0: --window and --stride for all.",
        ),
    )
    return _collected(command, options, "workload", WorkloadChoice)


def conversation_options(command: F) -> F:
    """--conversation and --number."""
    command = click.option(
        "--number",
        type=POSITIVE,
        default=1,
        show_default=True,
        help="Which conversation of the file, counted from 1.",
    )(command)
    return click.option(
        "--conversation", type=_FILE, help="A LoCoMo file. Default: the demo's conversation."
    )(command)


def out_option(name: str) -> Callable[[F], F]:
    return click.option(
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        default=Path(f"benchmarks/results/{name}.jsonl"),
        show_default=True,
        help="Where rows are appended.",
    )


tail_option = click.option(
    "--tail",
    type=TAIL,
    default=DEFAULT_TAIL,
    show_default=True,
    help="Best facts that are recomputed in mode inject: 5, 10% of the facts' tokens, 300t, the smallest of "
    "several, or 0.",
)


def prepare() -> None:
    """For commands that use torch and no engine of their own."""
    prepare_engine(verbose=False)


def show(rows: Sequence[Row], out: Path, *, as_json: bool) -> None:
    """Print the rows of a run, or its table, and say where they are."""
    if as_json:
        for row in rows:
            emit(row)
    else:
        from inferscale.bench.report import table

        click.echo(table(rows))
    say(f"Rows appended to {out}.")


def read_counts(option: str, text: str, least: int = 0) -> tuple[int, ...]:
    """Numbers separated by commas. Raises InvalidInput."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < least:
        raise InvalidInput(
            f"{option} is {text!r}; give whole numbers from {least}, separated by commas, such as 5,50."
        )
    return counts


def _collected(command: F, options: Sequence[Callable[[Any], Any]], name: str, kind: type[Any]) -> F:
    """`command` with these options, handed over in one value of `kind` as the argument `name`."""

    @functools.wraps(command)
    def collecting(*arguments: Any, **given: Any) -> Any:
        values = {field: given.pop(field) for field in kind._fields}
        return command(*arguments, **given, **{name: kind(**values)})

    wrapped: Any = collecting
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]


def read_engine_args(texts: Sequence[str]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` from NAME=JSON. Raises InvalidInput."""
    arguments = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            if not equals or not name.strip():
                raise ValueError("it has no name or no =")
            arguments[name.strip().replace("-", "_")] = json.loads(value)
        except ValueError as error:
            raise InvalidInput(
                f"--engine-arg is {text!r}; give NAME=JSON, such as max_num_seqs=512 or "
                f"""attention_backend='"FLASH_ATTN"'. ({error})"""
            ) from error
    return arguments
