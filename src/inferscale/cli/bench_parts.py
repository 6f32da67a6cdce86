"""`inferscale bench …`: decoding, whole chats, kernels and recall."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from inferscale.bench.options import DecodeOptions, E2eOptions, RandomTokens, TiersOptions
from inferscale.cli.bench_options import (
    EngineChoice,
    conversation_options,
    engine_options,
    out_option,
    pool_dtype_option,
    prepare,
    read_counts,
    show,
    tail_option,
)
from inferscale.cli.engine import start_errors
from inferscale.cli.options import COUNT, POSITIVE, json_option
from inferscale.cli.output import say
from inferscale.config import EncodingConfig, PoolDtype
from inferscale.errors import InvalidInput
from inferscale.tail import Tail

_DECODE = DecodeOptions()
_E2E = E2eOptions()
_TIERS = TiersOptions()
_ENCODING = EncodingConfig()


@click.command()
@click.option(
    "--batches",
    default=",".join(map(str, _DECODE.batches)),
    show_default=True,
    help="Numbers of requests at once.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(min=2),
    default=_DECODE.output_tokens,
    show_default=True,
    help="Tokens of an answer.",
)
@click.option(
    "--k", type=POSITIVE, default=_DECODE.k, show_default=True, help="Facts that answers stand behind."
)
@click.option(
    "--repeats", type=POSITIVE, default=_DECODE.repeats, show_default=True, help="Measurements of each batch."
)
@click.option(
    "--alternations",
    type=POSITIVE,
    default=_DECODE.alternations,
    show_default=True,
    help="How often both engines are started in turn.",
)
@click.option("--seed", type=COUNT, default=0, show_default=True, help="Of the random token ids.")
@out_option("decode")
@engine_options
@json_option
def decode(
    batches: str,
    output_tokens: int,
    k: int,
    repeats: int,
    alternations: int,
    seed: int,
    out: Path,
    engine: EngineChoice,
    as_json: bool,
) -> None:
    """Time per output token: stock vLLM and with the connector, behind cached and injected facts."""
    options = DecodeOptions(read_counts("--batches", batches, 1), output_tokens, k, repeats, alternations)
    spec = engine.spec()
    from inferscale.bench.decode import DecodeTask, measure_decode
    from inferscale.bench.harness import BenchRun
    from inferscale.bench.source import Need, RandomSource, sized
    from inferscale.windows import WindowPolicy

    tokens = RandomTokens(seed=seed)
    spec = sized(spec, RandomSource(tokens), [Need(k, output_tokens=output_tokens)])
    encoding = EncodingConfig()
    policy = WindowPolicy.of(encoding)
    run = BenchRun("decode", spec.name, out)
    measure_decode(DecodeTask("connector", spec, options, tokens, policy), run, say)
    show(run.rows, out, as_json=as_json)


@click.command()
@click.option(
    "--tier",
    type=click.Choice(["host", "disk"]),
    default=_TIERS.tier,
    show_default=True,
    help="Where facts are loaded from: host memory, or a temporary folder on disk.",
)
@click.option("--k", type=POSITIVE, default=_TIERS.k, show_default=True, help="Facts in the prompt.")
@click.option(
    "--questions",
    type=POSITIVE,
    default=_TIERS.num_questions,
    show_default=True,
    help="Questions of each of two users.",
)
@click.option("--seed", type=COUNT, default=0, show_default=True, help="Of the random token ids.")
@out_option("tiers")
@engine_options
@json_option
def tiers(
    tier: str, k: int, questions: int, seed: int, out: Path, engine: EngineChoice, as_json: bool
) -> None:
    """Time to first token where the facts' KV has left the pool, on random token ids."""
    spec = engine.spec()
    from inferscale.bench.harness import BenchRun
    from inferscale.bench.shapes import read_config, token_size_bytes
    from inferscale.bench.source import Need, RandomSource, sized
    from inferscale.bench.tiers import USERS, measure_tiers, tier_spec
    from inferscale.windows import WindowPolicy

    options = TiersOptions(tier, k, questions)
    source = RandomSource(RandomTokens(seed=seed, facts_per_user=k))
    need = Need(k, num_users=len(USERS))
    config = read_config(Path(spec.model))
    if config is None:
        raise InvalidInput(f"--model is {spec.model}; give a folder with config.json, to size the pool.")
    row_bytes = token_size_bytes(config, spec.dtype, spec.pool_dtype)
    with start_errors(spec.model), tempfile.TemporaryDirectory(prefix="inferscale-tiers-") as folder:
        spec = tier_spec(sized(spec, source, [need]), source, need, tier, row_bytes, folder)
        say(f"Starting the engine with {spec.name} …")
        with spec.open() as running:
            run = BenchRun("tiers", spec.name, out, running.describe())
            policy = WindowPolicy.of(_ENCODING)
            measure_tiers(running, source, need, policy, options, run, say)
    show(run.rows, out, as_json=as_json)


@click.command()
@click.option("--k", type=COUNT, default=_E2E.k, show_default=True, help="Facts in the prompt.")
@click.option(
    "--questions",
    type=POSITIVE,
    default=_E2E.num_questions,
    show_default=True,
    help="Questions of each mode.",
)
@click.option(
    "--embedder",
    metavar="MODEL",
    help="Folder or hub name of the embedding model. Default: all-MiniLM-L6-v2.",
)
@click.option(
    "--embedder-device",
    "devices",
    default=",".join(_E2E.devices),
    show_default=True,
    help="Where the embedder and its index are; several, separated by commas, are measured in turn.",
)
@tail_option
@conversation_options
@out_option("e2e")
@engine_options
@json_option
def e2e(
    k: int,
    questions: int,
    embedder: str | None,
    devices: str,
    tail: Tail,
    conversation: Path | None,
    number: int,
    out: Path,
    engine: EngineChoice,
    as_json: bool,
) -> None:
    """From a question's text to the first token, with k facts injected and without memory."""
    from inferscale.bench.conversation import read_conversation

    names = tuple(name.strip() for name in devices.split(",") if name.strip())
    options = E2eOptions(k, questions, names, tail)
    if not options.devices:
        raise InvalidInput(f"--embedder-device is {devices!r}; give a device such as cpu or cuda.")
    if engine.random_weights is not None and engine.tokenizer is None:
        raise InvalidInput("--random-weights has no tokenizer for texts; give a folder with --tokenizer.")
    data = read_conversation(conversation, number)
    spec = engine.spec()
    from inferscale.bench.e2e import measure_e2e

    with start_errors(spec.model):
        rows = measure_e2e(spec, data, options, out, say, embedder)
    show(rows, out, as_json=as_json)


@click.command()
@click.option("--tokens", default="1500,6000", show_default=True, help="Tokens that one launch moves.")
@click.option(
    "--shape",
    default="llama-3.1-8b",
    show_default=True,
    help="Whose keys and values: a shape's name, or the path of a config.json.",
)
@pool_dtype_option
@out_option("kernels")
@json_option
def kernels(tokens: str, shape: str, pool_dtype: PoolDtype, out: Path, as_json: bool) -> None:
    """Bandwidth of the injection and capture kernels beside a device copy, on a GPU."""
    counts = read_counts("--tokens", tokens, 1)
    prepare()
    from inferscale.bench.harness import BenchRun
    from inferscale.bench.kernels import KernelShape, run_kernels
    from inferscale.bench.shapes import model_folder, read_config
    from inferscale.model_size import kv_shape

    config = read_config(model_folder(shape))
    assert config is not None
    run = BenchRun("kernels", shape, out)
    run_kernels(run, counts, say, shape=KernelShape(*kv_shape(config)), pool_dtype=pool_dtype)
    show(run.rows, out, as_json=as_json)


@click.command()
@click.option(
    "--embedder",
    "embedders",
    metavar="MODEL",
    multiple=True,
    help="Folder or hub name of an embedding model; may be repeated. Default: all-MiniLM-L6-v2.",
)
@click.option("--k", "ks", default="10,50", show_default=True, help="Numbers of facts that are found.")
@click.option(
    "--conversation",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="A LoCoMo file.",
)
@out_option("recall")
@json_option
def recall(embedders: tuple[str, ...], ks: str, conversation: Path, out: Path, as_json: bool) -> None:
    """How often the facts that answer a question are among the k found."""
    counts = read_counts("--k", ks, 1)
    prepare()
    from inferscale.bench.recall import run_recall

    show(run_recall(conversation, embedders or ("default",), counts, out, say), out, as_json=as_json)
