"""Settings: frozen dataclasses, defaults exist here only, unknown keys are refused."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from inferscale.catalog_url import IN_FOLDER, check_url, has_password
from inferscale.config_checks import check_int, check_number, check_path, from_mapping, parse_size
from inferscale.errors import InvalidConfig
from inferscale.fact_order import FactOrder

TierWait = Literal["auto", "always", "never"]
PoolDtype = Literal["auto", "int8", "fp8"]
InjectionPath = Literal["auto", "fused", "portable", "none"]
SelfCheck = Literal["auto", "always", "never"]

AUTO = "auto"
DEFAULT_POOL_BYTES = 2**30
DEFAULT_TAIL = "6,12%"
"""Of a question without earlier turns (`tail`)."""
DEFAULT_ORDER: FactOrder = "best-last"
MIN_MIXED, MAX_MIXED = 4, 512
"""Facts of a mixed pass (`EncodingConfig.mixed`)."""
MAX_NEIGHBOURS = 64
KV_FOLDER = "kv"
"""Of a data folder: copies of KV on disk."""


def check_mixed(value: object, name: str) -> None:
    if value != 0 or isinstance(value, bool):
        try:
            check_int(value, name, MIN_MIXED, MAX_MIXED)
        except InvalidConfig as error:
            raise InvalidConfig(f"{error} 0 turns mixed passes off.") from None


def default_runtime_dir(engine_id: str) -> str:
    """Owner-only folder for the socket and the plan secret of one engine.

    Short on purpose: a Unix socket path may have 107 bytes only.
    """
    name = hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()
    return str(Path(tempfile.gettempdir()) / f"inferscale-{os.getuid()}" / name)


@dataclass(frozen=True)
class ConnectorConfig:
    """`kv_connector_extra_config` of the connector: read by both of its sides and by the front end."""

    pool_size_bytes: int | str = AUTO
    """Memory of the KV pool on each worker, in bytes (or '512MiB', '2GB'). 'auto': on a GPU, `OfflineEngine`
    takes a quarter of what the model leaves (`budget`); everywhere else, also where vLLM is started by its
    own flags, 1 GiB."""
    pool_dtype: PoolDtype = "auto"
    """How the pool keeps KV, in all tiers. `auto`: as vLLM's cache does, bit for bit. `int8`, `fp8`: a byte
    an element and scales for each token, which is inexact (docs/quality.md has what it costs)."""
    page_size_tokens: int = 4
    """Tokens in one page of the pool; a segment occupies whole pages."""
    host_size_bytes: int | str = 0
    """Host memory of each worker for copies of what the pool holds, in bytes (or '32GiB'); 0: none. A segment
    that has left the pool is copied back when a request needs it."""
    disk_size_bytes: int | str = 0
    """The same on disk, for each worker; it outlives the engine. 0: none."""
    disk_dir: str | None = None
    """Folder of the copies on disk."""
    cold_location: str | None = None
    """Folder that several servers mount, or a URL of fsspec such as s3://bucket/prefix, for copies that they
    share: a user's KV is then loaded where it was not encoded. None: no copies are shared."""
    encryption_key_file: str | None = None
    """File with the key that they are encrypted with; without one, $INFERSCALE_ENCRYPTION_KEY. The server's
    memory takes the same where `server` names no other."""
    max_share: float = 0.5
    """Of the pool, of host memory and of disk, what one scope may hold while others want room."""
    tier_wait: TierWait = "auto"
    """Whether a request waits while its segments come from host memory or disk. `auto`: where that takes less
    long than to prefill them, as this engine measures. Those it does not wait for come for the next one."""
    runtime_dir: str | None = None
    """Folder for the residency socket and the plan secret; default: one per engine id in the
    system's temporary folder."""
    injection_path: InjectionPath = "auto"
    """`fused`: kernels for all layers at once, on CUDA GPUs; `portable`: plain torch and vLLM's own write,
    anywhere; `auto`: fused where it can run and gives the same. `none`: nothing is captured or injected and
    facts are text, also with a model that is refused otherwise (docs/models.md)."""
    compile_injection: bool = True
    """Compile the rotation of the portable injection path with torch.compile where that works."""
    self_check: SelfCheck = "auto"
    """Whether the front end asks the engine, before any fact is encoded, if moved KV says what text says
    (`self_check`); where it does not, nothing is injected. `auto`: at the first start with a model."""
    server: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the server's memory (`ServerConfig`), which the connector passes over: vLLM hands them to
    both, since a middleware gets no arguments of its own."""

    def __post_init__(self) -> None:
        if self.pool_size_bytes != AUTO:
            size = parse_size(self.pool_size_bytes, "pool_size_bytes")
            if size <= 0:
                raise InvalidConfig(f"pool_size_bytes is {self.pool_size_bytes!r}; it must be above 0.")
            object.__setattr__(self, "pool_size_bytes", size)
        check_int(self.page_size_tokens, "page_size_tokens", 1, 1024)
        for name in ("host_size_bytes", "disk_size_bytes"):
            size = parse_size(getattr(self, name), name)
            if size < 0:
                raise InvalidConfig(f"{name} is {getattr(self, name)!r}; allowed are sizes from 0.")
            object.__setattr__(self, name, size)
        if self.disk_dir is not None and (not isinstance(self.disk_dir, str) or not self.disk_dir):
            raise InvalidConfig(
                f"disk_dir is {self.disk_dir!r}; allowed is the path of a folder as a string."
            )
        if self.disk_bytes and self.disk_dir is None:
            raise InvalidConfig("disk_size_bytes is given without disk_dir; name the folder of the copies.")
        if self.cold_location is not None and (
            not isinstance(self.cold_location, str) or not self.cold_location
        ):
            raise InvalidConfig(
                f"cold_location is {self.cold_location!r}; allowed is a folder's path or a URL such as "
                "s3://bucket/prefix."
            )
        if self.cold_location is not None and has_password(self.cold_location):
            raise InvalidConfig(
                "cold_location holds a password, and vLLM shows this setting in its log. Give it in the "
                "environment, as AWS_SECRET_ACCESS_KEY or FSSPEC_SFTP_PASSWORD."
            )
        check_path(self.encryption_key_file, "encryption_key_file")
        share = self.max_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise InvalidConfig(f"max_share is {share!r}; allowed are numbers above 0, up to 1.")
        if self.runtime_dir is not None and (not isinstance(self.runtime_dir, str) or not self.runtime_dir):
            raise InvalidConfig(
                f"runtime_dir is {self.runtime_dir!r}; allowed is the path of a folder as a string. Leave it "
                "out for the default."
            )
        choices = {
            "injection_path": InjectionPath,
            "pool_dtype": PoolDtype,
            "tier_wait": TierWait,
            "self_check": SelfCheck,
        }
        for name, choice in choices.items():
            if getattr(self, name) not in get_args(choice):
                allowed = ", ".join(get_args(choice))
                raise InvalidConfig(f"{name} is {getattr(self, name)!r}; allowed are {allowed}.")
        if not isinstance(self.compile_injection, bool):
            raise InvalidConfig(
                f"compile_injection is {self.compile_injection!r}; allowed are true and false without quotes."
            )
        if not isinstance(self.server, Mapping):
            raise InvalidConfig(
                f"server is {self.server!r}; allowed is an object with the server's settings."
            )

    @property
    def is_auto_size(self) -> bool:
        """Whether the pool's size is left to whoever starts the engine."""
        return self.pool_size_bytes == AUTO

    @property
    def host_bytes(self) -> int:
        return int(self.host_size_bytes)

    @property
    def disk_bytes(self) -> int:
        return int(self.disk_size_bytes)

    @property
    def size_bytes(self) -> int:
        """The pool's size as a number; the default where none was given and nobody decided one."""
        return DEFAULT_POOL_BYTES if self.is_auto_size else int(self.pool_size_bytes)


def connector_config(extra: Mapping[str, Any] | None, engine_id: str) -> ConnectorConfig:
    """The settings in `kv_connector_extra_config` with the runtime folder; the same on every side."""
    settings = dict(extra or {})
    if "runtime_dir" not in settings:
        settings["runtime_dir"] = default_runtime_dir(engine_id)
    elif settings["runtime_dir"] is None:
        raise InvalidConfig(
            "runtime_dir in kv_connector_extra_config is null; give the path of a folder, or leave it out "
            "for the default of one folder for each engine."
        )
    return from_mapping(ConnectorConfig, settings, "kv_connector_extra_config")


@dataclass(frozen=True)
class EncodingConfig:
    """How facts are encoded (Context-Window Encoding)."""

    window: int = 20
    """Facts placed before the captured ones in an encode pass; they are computed and thrown away."""
    stride: int = 20
    """Facts captured by one pass over a run of neighbours."""
    mixed: int = 60
    """About so many facts of a scope are encoded together, in both directions and in an order of no meaning,
    once there are so many (`windows`); `window` and `stride` are for fewer. 0: they are for all."""
    neighbours: int = 1
    """Facts of a mixed pass that were said one after the other and stay together in it."""

    def __post_init__(self) -> None:
        check_int(self.window, "window", 0)
        check_int(self.stride, "stride", 1)
        check_mixed(self.mixed, "mixed")
        check_int(self.neighbours, "neighbours", 1, MAX_NEIGHBOURS)


@dataclass(frozen=True)
class RetrievalConfig:
    """How the facts that a search finds are ranked: `1 / (rank_constant + rank)` of each ranking, times its
    weight, is summed (reciprocal rank fusion)."""

    lexical_weight: float = 1.0
    """Of the ranking by words (BM25), where the ranking by meaning has 1. 0: it is not made."""
    recency_weight: float = 0.0
    """Of the ranking of what the others found by how new it is. 0: it is not made."""
    rank_constant: int = 10
    """The larger, the less the first ranks count beside those that follow."""
    candidates: int = 100
    """So many facts of each ranking are fused; twice `top_k` where that is more."""
    reranked: int = 50
    """So many of the best found are read again by the reranker, where there is one; `top_k` where that is
    more."""
    duplicate_similarity: float | None = 0.97
    """A fact whose vector is this similar (cosine) to that of a better one comes behind all others that
    were found, so that repetitions do not fill the `top_k`. None: it keeps its place."""

    def __post_init__(self) -> None:
        for name in ("lexical_weight", "recency_weight"):
            check_number(getattr(self, name), f"retrieval.{name}", 0.0, 100.0)
        check_int(self.rank_constant, "retrieval.rank_constant", 1, 10_000)
        check_int(self.candidates, "retrieval.candidates", 1, 10_000)
        check_int(self.reranked, "retrieval.reranked", 1, 1000)
        if self.duplicate_similarity is not None:
            check_number(self.duplicate_similarity, "retrieval.duplicate_similarity", 0.5, 1.0)


@dataclass(frozen=True)
class MemoryConfig:
    """Where memory lives and how it is searched."""

    data_dir: str | Path = field(default_factory=lambda: default_data_dir())
    embedder: str | Path | None = None
    """Folder or hub name of a sentence-embedding model; default: all-MiniLM-L6-v2. The name `static`
    is kept for token vectors made once of the default: a query is embedded in tens of microseconds,
    and less is found (`retrieval.static`). Vectors of different embedders do not go together, so a
    folder keeps its embedder until `inferscale reembed` changes it."""
    embedder_device: str = "auto"
    """Torch device of the embedder and of the search index, such as `cpu` or `cuda:0`. On a GPU both need
    memory beside the engine's: `auto` is a GPU where there is one with 1 GiB free, and changes to the CPU
    where it fails all the same; a device that is named is used or refused."""
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    reranker: str | Path | None = None
    """Folder or hub name of a cross-encoder that reads the best found again and puts them into its order. It
    takes a forward pass a fact, on the CPU. None: no reranker."""
    max_facts_per_user: int | None = None
    """What would exceed it is refused (QuotaExceeded). Without a user, of an agent or run. None: no limit."""
    max_bytes_per_user: int | None = None
    """Of texts and metadata, without histories and vectors."""
    encryption_key_file: str | Path | None = None
    """File with the key that the folder is encrypted with (docs/operations.md). Without one the key is
    $INFERSCALE_ENCRYPTION_KEY, and without that the folder is not encrypted."""
    catalog: str | None = field(default=None, repr=False)
    """URL of a PostgreSQL database that holds the catalog instead of the folder, so that several machines
    share it: postgresql://USER@HOST:PORT/DATABASE. Without one it is $INFERSCALE_CATALOG; `folder`: the
    folder holds it even where that is set."""

    def __post_init__(self) -> None:
        if self.catalog not in (None, IN_FOLDER):
            check_url(self.catalog, "catalog")
        for name in ("max_facts_per_user", "max_bytes_per_user"):
            if getattr(self, name) is not None:
                check_int(getattr(self, name), name, 1)
        if not isinstance(self.embedder_device, str) or not self.embedder_device:
            raise InvalidConfig(
                f"embedder_device is {self.embedder_device!r}; allowed are 'auto', 'cpu' and the "
                "accelerators of this machine, such as 'cuda' or 'cuda:0'."
            )


@dataclass(frozen=True)
class ExtractionConfig:
    """How conversations become facts (`add(…, infer=True)`)."""

    retries: int = 2
    """Further attempts where a model's answer cannot be used; then the turns are stored as they were said."""
    max_chars: int = 6000
    """Of a conversation in one prompt; a longer one is read in parts."""
    max_similar: int = 8
    """Stored facts that a new one is compared with."""
    same_above: float = 0.985
    """Cosine similarity from which two facts with the same numbers, names and negations are one. High: of
    all-MiniLM-L6-v2, `bought a red car` and `sold a red car` have 0.968, as `likes` and `loves pizza` do."""
    ask_above: float = 0.4
    """Cosine similarity from which a model is asked what a new fact does to a stored one."""

    def __post_init__(self) -> None:
        check_int(self.retries, "retries", 0, 10)
        check_int(self.max_chars, "max_chars", 100)
        check_int(self.max_similar, "max_similar", 1, 100)
        for name in ("same_above", "ask_above"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not -1 <= value <= 1:
                raise InvalidConfig(f"{name} is {value!r}; allowed are numbers from -1 to 1.")


def default_data_dir() -> Path:
    """`$INFERSCALE_HOME`, or `inferscale` in the user's data folder."""
    home = os.environ.get("INFERSCALE_HOME")
    if home:
        return Path(home)
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "inferscale"
