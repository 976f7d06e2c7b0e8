"""Adapters through the whole engine: mixed batches, prefixes, and adapters that come and go while it runs."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer import LLM, LoRARequest, SamplingParams
from pegainfer.app.lora import wait
from pegainfer.contract.errors import RequestError, UnsupportedError
from tests.support.qwentext import SMALL
from tests.support.servedqwen3 import SERVED, write_served_folder
from tests.support.tinylora import ADAPTERS, TinyAdapter, write_adapter

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def load(path: Path, **options: Any) -> LLM:
    common = {"activation_dtype": "f32", "enable_lora": True, "max_lora_rank": 8, "kv_cache_memory": 1 << 22}
    return LLM(str(path), **common | options)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoRARequest]]:
    folder = tmp_path_factory.mktemp("lora")
    path = write_served_folder(folder / "model")
    adapters = [
        LoRARequest(name, i + 1, str(write_adapter(a, SERVED, folder / name)))
        for i, (name, a) in enumerate(ADAPTERS.items())
    ]
    return path, adapters


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    rng = np.random.RandomState(seed)
    return [rng.randint(0, SMALL - 3, rng.randint(1, 80)).tolist() for _ in range(count)]


def tokens(llm: LLM, texts: list[list[int]], lora: Any) -> list[list[int]]:
    given = [{"prompt_token_ids": t} for t in texts]
    return [r.outputs[0].token_ids for r in llm.generate(given, GREEDY, lora_request=lora, use_tqdm=False)]


def test_a_mixed_batch_gives_each_request_its_own_tokens(served: tuple[Path, list[LoRARequest]]) -> None:
    path, adapters = served
    texts = prompts(18)
    lora = [*itertools.islice(itertools.cycle([None, *adapters]), len(texts))]
    with load(path, max_loras=len(adapters), prefix_cache=False) as llm:
        together = tokens(llm, texts, lora)
        for text, one, got in zip(texts, lora, together, strict=True):
            assert tokens(llm, [text], one) == [got]
        assert together != tokens(llm, texts, None)


def test_adapters_share_no_prefix_with_others_or_with_what_had_their_name(
    served: tuple[Path, list[LoRARequest]], tmp_path: Path
) -> None:
    path, adapters = served
    text = np.random.RandomState(9).randint(0, SMALL - 3, 70).tolist()

    def run(llm: LLM, lora: LoRARequest | None) -> tuple[list[int], int]:
        (found,) = llm.generate({"prompt_token_ids": text}, GREEDY, lora_request=lora, use_tqdm=False)
        return found.outputs[0].token_ids, found.num_cached_tokens or 0

    with load(path, max_loras=2) as llm:
        base, first, second = (run(llm, a) for a in (None, adapters[0], adapters[1]))
        assert (base[1], first[1], second[1]) == (0, 0, 0)
        assert run(llm, adapters[0]) == (first[0], 64) and run(llm, None) == (base[0], 64)
        # Other content under the name of the first.
        llm.unload_lora(adapters[0].lora_name)
        other = TinyAdapter("other", 99, ADAPTERS["plain"].config, ADAPTERS["plain"].ranks)
        folder = write_adapter(other, SERVED, tmp_path / "other")
        replaced = LoRARequest(adapters[0].lora_name, 1, str(folder))
        found = run(llm, replaced)
        assert found[1] == 0 and found[0] != first[0]
        # And the content of the first under another name finds what the first has left.
        llm.unload_lora(replaced.lora_name)
        assert run(llm, LoRARequest("again", 7, adapters[0].lora_path)) == (first[0], 64)


def test_adapters_come_and_go_while_requests_run(served: tuple[Path, list[LoRARequest]]) -> None:
    """Random loads and unloads between batches; every answer is that of an engine with all of them."""
    path, adapters = served
    texts = prompts(30, seed=4)
    with load(path, max_loras=len(adapters), prefix_cache=False) as llm:
        wanted = {a: tokens(llm, texts, a) for a in (None, *adapters)}
    rng = np.random.RandomState(5)
    with load(path, max_loras=3) as llm:
        for _ in range(12):
            held = [a for a in adapters if a.lora_name in {x.name for x in llm._engine.adapters()}]
            for a in held:
                if rng.rand() < 0.5:
                    wait(partial(llm._engine.unload_adapter, a.lora_name))
                    held = [h for h in held if h is not a]
            fresh = [a for a in adapters if a not in held]
            rng.shuffle(fresh)  # type: ignore[arg-type]
            usable: list[LoRARequest | None] = [None, *held, *fresh[: 3 - len(held)]]
            picked = [(int(i), usable[rng.randint(len(usable))]) for i in rng.randint(0, len(texts), 10)]
            got = tokens(llm, [texts[i] for i, _ in picked], [a for _, a in picked])
            assert got == [wanted[a][i] for i, a in picked]


def test_refusals_say_what_is_wrong(served: tuple[Path, list[LoRARequest]]) -> None:
    path, adapters = served
    with load(path, max_loras=1) as llm:
        tokens(llm, prompts(1), adapters[0])
        moved = LoRARequest(adapters[0].lora_name, 1, adapters[1].lora_path)
        with pytest.raises(RequestError, match="loaded from another folder"):
            tokens(llm, prompts(1), moved)
        with pytest.raises(RequestError, match="expected LoRARequest; got str"):
            tokens(llm, prompts(1), ["plain"])
    with LLM(str(path)) as llm, pytest.raises(UnsupportedError, match="serves no adapters"):
        tokens(llm, prompts(1), adapters[0])
