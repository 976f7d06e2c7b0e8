"""A model gives the same tokens however its work is cut: batches, chunks, prefix hits, preemption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pegainfer.app.offline import LLM
from pegainfer.app.sampling_params import SamplingParams

DRAWN = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    seed=7,
    presence_penalty=0.3,
    repetition_penalty=1.1,
    max_tokens=40,
    ignore_eos=True,
)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@dataclass(frozen=True)
class Workload:
    """Prompts that are continued by 40 tokens each, every other one greedily.

    Args:
        load: makes an LLM with these options; its sequences may have 512 tokens.
        block_bytes: of 16 tokens' keys and values.
        repeats: how often all prompts are queued for preemption, so that a quick model has enough of them
            at once.
        longest_stepwise: the longest prompt whose prefill is also cut into single tokens, a step each.
    """

    load: Callable[..., LLM]
    prompts: list[list[int]]
    block_bytes: int
    repeats: int = 4
    longest_stepwise: int = 512

    @property
    def params(self) -> list[SamplingParams]:
        return [GREEDY if i % 2 else DRAWN for i in range(len(self.prompts))]

    def plain(self) -> list[list[int]]:
        """Each prompt alone and in one piece, nothing cached."""
        with self.load(prefix_cache=False, max_prefill_tokens=512, pipeline_depth=1) as llm:
            found = [tokens(llm, [p], [s])[0] for p, s in zip(self.prompts, self.params, strict=True)]
        assert all(len(t) == 40 for t in found)
        return found

    def batched(self) -> tuple[list[list[int]], list[list[int]]]:
        """In one batch, and once more in the opposite order (but given back in this one)."""
        with self.load(prefix_cache=False, max_prefill_tokens=512) as llm:
            backwards = tokens(llm, self.prompts[::-1], self.params[::-1])[::-1]
            return tokens(llm, self.prompts, self.params), backwards

    def chunked(self, chunk: int, chosen: list[int]) -> list[list[int]]:
        """Prefills cut into pieces of so many tokens.

        Args:
            chosen: numbers of the prompts to run.
        """
        with self.load(prefix_cache=False, max_prefill_tokens=chunk) as llm:
            return tokens(llm, [self.prompts[i] for i in chosen], [self.params[i] for i in chosen])

    def cached(self) -> list[list[int]]:
        """A second time, when each full block but the last token's comes from the cache."""
        with self.load(max_prefill_tokens=512) as llm:
            tokens(llm, self.prompts, self.params)
            again = llm.generate([{"prompt_token_ids": p} for p in self.prompts], self.params, use_tqdm=False)
        assert [o.num_cached_tokens for o in again] == [(len(p) - 1) // 16 * 16 for p in self.prompts]
        return [o.outputs[0].token_ids for o in again]

    def preempted(self) -> list[list[int]]:
        """With room for one long sequence and little more: they give way to each other and are recomputed."""
        with self.load(kv_cache_memory=36 * self.block_bytes, max_num_seqs=8) as llm:
            found = tokens(llm, self.prompts * self.repeats, self.params * self.repeats)
            assert llm.stats().preemptions > 0
        return found

    def on_one_thread(self) -> list[list[int]]:
        with self.load(prefix_cache=False, threads=1) as llm:
            return tokens(llm, self.prompts, self.params)


def tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs]


class Invariance:
    """The tests of a line. Its test module has a subclass, and a fixture `work` that gives a Workload."""

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, work: Workload) -> list[list[int]]:
        return work.plain()

    def test_batched_and_pipelined(self, work: Workload, plain: list[list[int]]) -> None:
        assert work.batched() == (plain, plain)

    @pytest.mark.parametrize("chunk", [1, 17, 64])
    def test_chunked(self, work: Workload, plain: list[list[int]], chunk: int) -> None:
        longest = work.longest_stepwise if chunk == 1 else 512
        chosen = [i for i, p in enumerate(work.prompts) if len(p) <= longest]
        assert work.chunked(chunk, chosen) == [plain[i] for i in chosen]

    def test_prefix_hits(self, work: Workload, plain: list[list[int]]) -> None:
        assert work.cached() == plain

    def test_preempted(self, work: Workload, plain: list[list[int]]) -> None:
        assert work.preempted() == plain * work.repeats

    def test_one_thread(self, work: Workload, plain: list[list[int]]) -> None:
        assert work.on_one_thread() == plain
