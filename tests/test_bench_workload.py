"""Random and spoken workloads, model shapes, and what size of engine they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import WordEmbedder
from inferscale.bench.conversation import BenchConversation
from inferscale.bench.engine import EngineSpec, random_weights
from inferscale.bench.options import RandomTokens
from inferscale.bench.shapes import SHAPES, model_folder, token_size_bytes
from inferscale.bench.source import Need, RandomSource, SpokenSource, sized
from inferscale.bench.spoken import SpokenWorkload
from inferscale.bench.workload import RandomWorkload, fact_lengths
from inferscale.errors import InvalidInput
from inferscale.facts import Turn
from inferscale.model_size import kv_shape
from inferscale.tail import Tail

CONVERSATION = BenchConversation(
    "talk",
    tuple(Turn(f"Number {number} likes the colour {number}", "Ana", "8 May") for number in range(12)),
    ("Who likes the colour 3?", "Who likes the colour 7?"),
)


def random_workload(**changes: Any) -> RandomWorkload:
    options = {"vocab_size": 512, "block_size": 16, "num_users": 2, "num_facts": 24, **changes}
    return RandomWorkload(**options)


def test_facts_have_20_to_60_tokens_and_30_on_average() -> None:
    lengths = fact_lengths(np.random.default_rng(0), 20_000)
    assert (lengths.min(), lengths.max()) == (20, 60)
    assert lengths.mean() == pytest.approx(30, abs=0.3)


def test_the_same_arguments_give_the_same_ids() -> None:
    one, two, other = random_workload(), random_workload(), random_workload(seed=1)
    assert one.facts(1) == two.facts(1) != other.facts(1)
    assert one.ask(0, 3, 5) == two.ask(0, 3, 5)
    assert one.facts(0) != one.facts(1)
    assert one.head == two.head != other.head


@pytest.mark.parametrize(("block_size", "k"), [(16, 5), (16, 24), (128, 20), (128, 24)])
def test_head_and_facts_fill_whole_blocks(block_size: int, k: int) -> None:
    workload = random_workload(block_size=block_size)
    for number in range(4):
        asked = workload.ask(1, number, k)
        assert len(asked.memory) % block_size == 0
        assert asked.memory == workload.head + tuple(
            t for item in asked.items for t in workload.facts(1)[item]
        )
        assert len(set(asked.items)) == k
        assert len(asked.rest) == len(asked.hit_rest) == len(asked.none) == 32
        assert asked.rest != asked.hit_rest


def test_questions_differ_in_their_facts_and_order() -> None:
    workload = random_workload()
    assert len({workload.ask(0, number, 20).items for number in range(5)}) == 5
    assert workload.ask(0, 0, 20).items != workload.ask(1, 0, 20).items


def test_no_facts_and_tail() -> None:
    workload = random_workload()
    none = workload.ask(0, 0, 0)
    assert (none.memory, none.rest) == ((), none.none)
    asked = workload.ask(0, 0, 8, tail=Tail(3))
    assert len(asked.facts) == 5
    assert len(asked.rest) == asked.num_recomputed_tokens + 32 >= 32 + 3 * 20
    assert len(asked.memory) % 16 == 0
    share = workload.ask(0, 0, 20, tail=Tail(5, share=0.1))
    total = len(share.memory) - len(share.head) + share.num_recomputed_tokens
    assert 0 < share.num_recomputed_tokens <= 0.1 * total
    assert len(share.memory) % 16 == 0
    assert (workload.ask(0, 0, 8, tail=Tail(8)).facts, workload.ask(0, 0, 8).num_recomputed_tokens) == ((), 0)
    with pytest.raises(InvalidInput, match=r"k=25 was asked for; a user has 24 facts"):
        workload.ask(0, 0, 25)


def test_a_tiny_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidInput, match="20"):
        random_workload(vocab_size=20)


# conversations ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoken() -> SpokenWorkload:
    from inferscale.prompt import PromptBuilder
    from test_prompt import CHATML, tokenizer_with

    prompts = PromptBuilder(tokenizer_with(CHATML))
    with pytest.MonkeyPatch.context() as patch:
        # A benchmark's facts go into its own folder, wherever the machine keeps its catalog.
        patch.setenv("INFERSCALE_CATALOG", "postgresql://u@127.0.0.1:1/x")
        return SpokenWorkload(CONVERSATION, prompts, num_users=2, max_k=4, embedder=WordEmbedder())


def test_the_prompt_is_head_facts_and_rest(spoken: SpokenWorkload) -> None:
    asked = spoken.ask(0, 0, 4)
    assert asked.items[-1] == 3  # the best fact stands last
    assert asked.facts == tuple(spoken.facts(0)[item] for item in asked.items)
    assert asked.head == spoken.head
    assert asked.rest == asked.hit_rest
    assert asked.none
    tail = spoken.ask(0, 0, 4, tail=Tail(1))
    assert tail.items == asked.items[:-1]
    assert tail.memory + tail.rest == asked.memory + asked.rest, "the prompt is that of text"
    assert tail.rest == spoken.facts(0)[3] + asked.rest
    assert tail.num_recomputed_tokens == len(spoken.facts(0)[3])
    nothing = spoken.ask(0, 0, 4, tail=Tail(9))
    assert (nothing.items, nothing.facts) == ((), ())
    assert nothing.memory + nothing.rest == asked.memory + asked.rest
    none = spoken.ask(0, 0, 0)
    assert (none.head, none.facts, none.rest) == ((), (), none.none)


def test_users_have_the_same_turns_as_memories_of_their_own(spoken: SpokenWorkload) -> None:
    assert len(spoken.facts(1)) == len(spoken.facts(0)) == 12
    assert not set(spoken.facts(1)) & set(spoken.facts(0))


def test_more_facts_than_were_searched_for_are_refused(spoken: SpokenWorkload) -> None:
    with pytest.raises(InvalidInput, match="talk was searched for 4"):
        spoken.ask(0, 0, 5)


# shapes and sizes ---------------------------------------------------------------------------------


def test_shapes_have_a_config_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = {}
    for name in SHAPES:
        folder = model_folder(name)
        assert folder.name == name
        config = AutoConfig.from_pretrained(str(folder))
        assert type(config).__name__.replace("Config", "ForCausalLM") == SHAPES[name]["architectures"][0]
        sizes[name] = token_size_bytes(SHAPES[name])
    assert sizes["llama-3.1-8b"] == 128 * 1024
    assert sizes["qwen2.5-7b"] == 56 * 1024
    assert kv_shape(SHAPES["qwen2.5-7b"]) == (28, 4, 128)
    assert token_size_bytes(SHAPES["llama-3.1-8b"], "float32") == 256 * 1024


def test_a_shape_may_be_a_folder_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text("{}")
    (tmp_path / "mine.json").write_text('{"a": 1}')
    assert model_folder(str(own)) == model_folder(str(own / "config.json")) == own
    copied = model_folder(str(tmp_path / "mine.json"))
    assert copied.name == "mine"
    assert json.loads((copied / "config.json").read_text()) == {"a": 1}
    with pytest.raises(InvalidInput, match=r"the shape is 'nope'; give llama-3\.1-8b"):
        model_folder("nope")


def test_an_engine_is_as_large_as_its_workload_needs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"]))
    source = RandomSource(RandomTokens())
    needs = [Need(200), Need(50, num_users=100)]
    spec = sized(random_weights(str(tmp_path)), source, needs)
    tokens = sum(source.segments(needs[1]))
    assert spec.pool_size_bytes is not None
    assert tokens * 128 * 1024 < spec.pool_size_bytes < 2 * tokens * 128 * 1024
    assert spec.max_model_len == 8192
    assert spec.arguments()["max_model_len"] == 8192
    given = sized(random_weights(str(tmp_path), pool_size_bytes=5, max_model_len=2048), source, needs)
    assert (given.pool_size_bytes, given.max_model_len) == (5, 2048)
    hub = EngineSpec("somebody/model")
    assert sized(hub, source, needs) == hub
    assert EngineSpec.from_json(spec.to_json()) == spec


def test_arguments_of_the_engine() -> None:
    plain = EngineSpec("m").arguments()
    assert "load_format" not in plain
    assert "gpu_memory_utilization" not in plain
    assert EngineSpec("m", random_weights=True, tokenizer="t").arguments() == {
        "enforce_eager": False,
        "use_tqdm_on_load": False,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tokenizer": "t",
    }
    assert EngineSpec("m", extra={"max_num_seqs": 7}).arguments()["max_num_seqs"] == 7


def test_a_spoken_source_tells_sizes(monkeypatch: pytest.MonkeyPatch, spoken: SpokenWorkload) -> None:
    source = SpokenSource(CONVERSATION, "tokenizer")
    monkeypatch.setattr(source, "_workload", lambda need: spoken)
    need = Need(4, num_questions=2, output_tokens=7)
    assert source.segments(need) == [len(spoken.head), *map(len, spoken.facts(0))]
    assert source.longest(need) == 7 + max(
        len(one.memory) + len(one.rest) for one in (spoken.ask(0, number, 4) for number in range(2))
    )
