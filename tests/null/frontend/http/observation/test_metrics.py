from __future__ import annotations

import re
import resource
import time
from typing import Any

import numpy as np

from pegainfer.contract.event import EngineStats, TierStats
from pegainfer.contract.experts import ExpertTokens
from pegainfer.contract.peers import PeerStats
from pegainfer.frontend.http.observation.metrics import Histogram
from tests.support.asgi import Call, client, make_app, run, spin
from tests.support.fake_engine import FakeEngine, says

SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$")


def parse(text: str) -> dict[str, float]:
    """Samples by name and labels, model_name left out: 'pegainfer:x_total{reason="a"}'."""
    out: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.match(line)
        assert match, line
        labels = [part for part in (match[2] or "").split(",") if not part.startswith("model_name=")]
        assert len(labels) < len((match[2] or "").split(",")), f"no model_name: {line}"
        out[match[1] + ("{" + ",".join(labels) + "}" if labels else "")] = float(match[3])
    return out


def scrape(engine: FakeEngine, *bodies: dict[str, Any], **config: Any) -> dict[str, float]:
    """The page after these completions."""
    found: dict[str, float] = {}

    async def main() -> None:
        async with client(make_app(engine, **config)) as http:
            for body in bodies:
                route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
                await http.post(route, json=body)
            page = await http.get("/metrics")
            assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
            found.update(parse(page.text))

    run(main)
    return found


def test_histograms_count_what_was_answered() -> None:
    script = says("abcdefgh")
    found = scrape(
        FakeEngine(script),
        {"prompt": "hello", "max_tokens": 4},
        {"prompt": "hi", "max_tokens": 8, "stream": True},
        {"prompt": "x", "max_tokens": 8, "stop": "c"},
        {"prompt": "x", "n": 2, "max_tokens": 1},
    )
    p = "pegainfer:"
    assert found[p + 'request_success_total{finished_reason="length"}'] == 4
    assert found[p + 'request_success_total{finished_reason="stop"}'] == 1
    assert found[p + "request_generation_tokens_count"] == 5
    assert found[p + "request_generation_tokens_sum"] == 4 + 8 + 3 + 1 + 1
    assert found[p + 'request_generation_tokens_bucket{le="2"}'] == 2
    assert found[p + "request_prompt_tokens_sum"] == 5 + 2 + 1 + 1 + 1
    assert found[p + "time_to_first_token_seconds_count"] == 4  # one a prompt
    assert found[p + "inter_token_latency_seconds_count"] == 3 + 7 + 2
    assert found[p + "e2e_request_latency_seconds_count"] == 5
    assert found[p + 'e2e_request_latency_seconds_bucket{le="+Inf"}'] == 5
    assert found[p + "request_queue_time_seconds_count"] == 4  # not known where a stop string ended it
    assert found[p + "request_prefill_time_seconds_count"] == 4
    assert found[p + "request_decode_time_seconds_count"] == 4
    assert found[p + "request_time_per_output_token_seconds_count"] == 2
    assert found[p + 'host_seconds_total{stage="tokenize"}'] > 0


def test_text_work_is_counted_by_stage_and_by_what_was_known() -> None:
    chat = {"messages": [{"role": "user", "content": "x" * 215}], "max_tokens": 2}
    before = scrape(FakeEngine())
    found = scrape(FakeEngine(), chat, chat)
    for stage in ("tokenize", "template", "detokenize"):
        assert found[f'pegainfer:host_seconds_total{{stage="{stage}"}}'] > 0
    seen, known = ("pegainfer:tokenizer_cache_queries_total", "pegainfer:tokenizer_cache_hits_total")
    text = len("<|im_start|>user\n" + "x" * 215 + "<|im_end|>\n<|im_start|>assistant\n")
    assert found[seen] - before[seen] == 2 * text
    assert text <= found[known] - before[known] <= 2 * text


def test_the_engines_snapshot_is_shown() -> None:
    engine = FakeEngine()
    engine.set_stats(
        EngineStats(
            running=3,
            waiting=2,
            free_blocks=16,
            total_blocks=64,
            steps=10,
            preemptions=4,
            prompt_tokens=100,
            cached_tokens=32,
            generation_tokens=50,
            prefix_queries=96,
            prefix_hits=32,
            kind_steps={"decode": 8, "mixed": 2},
            kind_seconds={"decode": 1.25, "mixed": 0.25},
            step_sizes=(0, 6, 2, 0, 2),
            step_tokens=6 + 5 + 19,
            price_ratios=(0, 0, 1, 4, 0, 0, 0, 2, 0, 0, 0, 1),
            price_ratio_sum=20.5,
            slow_steps=3,
            host_seconds={"schedule": 0.25},
        )
    )
    found = scrape(engine)
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.75,
        "prompt_tokens_total": 100,
        "prompt_tokens_cached_total": 32,
        "generation_tokens_total": 50,
        "prefix_cache_queries_total": 96,
        "prefix_cache_hits_total": 32,
        "num_preemptions_total": 4,
        'step_seconds_count{kind="decode"}': 8,
        'step_seconds_sum{kind="mixed"}': 0.25,
        'iteration_tokens_total_bucket{le="1.0"}': 6,
        'iteration_tokens_total_bucket{le="7.0"}': 8,
        'iteration_tokens_total_bucket{le="+Inf"}': 10,
        "iteration_tokens_total_sum": 30,
        'step_price_ratio_bucket{le="0.9"}': 1,
        'step_price_ratio_bucket{le="1.0"}': 5,
        'step_price_ratio_bucket{le="2.0"}': 7,
        'step_price_ratio_bucket{le="+Inf"}': 8,
        "step_price_ratio_sum": 20.5,
        "step_slower_than_price_total": 3,
        'host_seconds_total{stage="schedule"}': 0.25,
        'startup_seconds{phase="warm"}': 0.25,
    }
    for name, value in expected.items():
        assert found["pegainfer:" + name] == value


def test_uptime_memory_and_the_device_are_shown() -> None:
    before = time.monotonic()
    found = scrape(FakeEngine())
    assert 0 < found["pegainfer:uptime_seconds"] <= time.monotonic() - before
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert 1 << 20 < found["pegainfer:resident_memory_bytes"] <= 1.5 * mine
    info = FakeEngine().info
    labels = f'{{architecture="{info.architecture}",device="{info.device}"}}'
    assert found["pegainfer:engine_info" + labels] == 1


def test_rejections_are_counted_by_reason() -> None:
    from pegainfer.contract.errors import EngineDeadError, QueueFullError

    engine = FakeEngine()
    before: dict[str, float] = {}
    found: dict[str, float] = {}

    async def main() -> None:
        async with client(make_app(engine)) as http:
            before.update(parse((await http.get("/metrics")).text))
            for error in (QueueFullError("full"), QueueFullError("full"), EngineDeadError("gone")):
                engine.refuse = error
                assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 503
            found.update(parse((await http.get("/metrics")).text))

    run(main)
    for reason in ("overloaded", "rate_limited", "engine_dead", "timeout"):  # a rate needs the 0 before the 1
        assert before[f'pegainfer:admission_rejections_total{{reason="{reason}"}}'] == 0
    assert found['pegainfer:admission_rejections_total{reason="overloaded"}'] == 2
    assert found['pegainfer:admission_rejections_total{reason="engine_dead"}'] == 1


def test_who_leaves_is_counted_as_aborted() -> None:
    engine = FakeEngine(paused=True)
    found: dict[str, float] = {}

    async def main() -> None:
        app = make_app(engine)
        call = Call(app, "/v1/completions", {"prompt": ["a", "b"], "n": 2})
        await spin()
        call.disconnect()
        await call.task
        async with client(app) as http:
            found.update(parse((await http.get("/metrics")).text))

    run(main)
    assert found['pegainfer:request_success_total{finished_reason="abort"}'] == 4


def test_the_prefix_fits_other_dashboards() -> None:
    found = scrape(FakeEngine(), metrics_prefix="vllm:")
    assert all(name.startswith("vllm:") for name in found)
    assert "vllm:num_requests_running" in found


def test_a_bucket_holds_its_own_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert histogram.total == 7.5


def test_tokens_of_experts_and_their_imbalance() -> None:
    """A layer that no token went through has no imbalance yet."""
    tokens = np.array([[6, 0, 3, 3], [0, 0, 0, 0]], "<i8").tobytes()
    engine = FakeEngine()
    engine.set_stats(EngineStats(experts=ExpertTokens((1, 3), 4, tokens)))
    found = scrape(engine)
    p = "pegainfer:expert_"
    assert [found[f'{p}tokens_total{{expert="{e}",layer="1"}}'] for e in range(4)] == [6, 0, 3, 3]
    assert found[p + 'tokens_total{expert="2",layer="3"}'] == 0
    assert found[p + 'imbalance{layer="1"}'] == 2  # 6 of 12 at one of four
    assert p + 'imbalance{layer="3"}' not in found
    engine.set_stats(EngineStats())
    assert not [name for name in scrape(engine) if "expert" in name]


def test_the_time_of_each_rank() -> None:
    engine = FakeEngine()
    assert not [name for name in scrape(engine) if "rank" in name]
    engine.set_stats(EngineStats(rank_seconds=(1.5, 2.0)))
    found = scrape(engine)
    assert [found[f'pegainfer:rank_step_seconds_total{{rank="{r}"}}'] for r in (0, 1)] == [1.5, 2.0]


def test_each_prefill_peer_has_its_figures() -> None:
    engine = FakeEngine(says("x"))
    assert not [name for name in scrape(engine) if "kv_peer" in name]
    peers = (
        PeerStats(address="127.0.0.1:1", connected=True, requests=9, failures=2, outstanding=1),
        PeerStats(address="unix:/p", blocks=4, nbytes=64, seconds=0.5),
    )
    engine.set_stats(EngineStats(peers=peers))
    found = {name: value for name, value in scrape(engine).items() if value and "kv_peer" in name}
    assert found == {
        'pegainfer:kv_peer_connected{peer="127.0.0.1:1"}': 1,
        'pegainfer:kv_peer_requests_total{peer="127.0.0.1:1"}': 9,
        'pegainfer:kv_peer_failures_total{peer="127.0.0.1:1"}': 2,
        'pegainfer:kv_peer_outstanding{peer="127.0.0.1:1"}': 1,
        'pegainfer:kv_peer_blocks_total{peer="unix:/p"}': 4,
        'pegainfer:kv_peer_read_bytes_total{peer="unix:/p"}': 64,
        'pegainfer:kv_peer_read_seconds_total{peer="unix:/p"}': 0.5,
    }


def test_each_kv_tier_has_its_figures() -> None:
    engine = FakeEngine(says("a"))
    assert not [name for name in scrape(engine) if "kv_tier" in name]
    tiers = (
        TierStats(kind="host", total_blocks=9, cached_blocks=4, in_flight=2, loaded_bytes=7, refused_loads=3),
        TierStats(kind="disk", total_blocks=90, hit_tokens=32, saved_bytes=5, saved_seconds=0.5, failures=1),
    )
    engine.set_stats(EngineStats(tiers=tiers))
    found = {name: value for name, value in scrape(engine).items() if value and "kv_tier" in name}
    assert found == {
        'pegainfer:kv_tier_capacity{tier="host"}': 9,
        'pegainfer:kv_tier_capacity{tier="disk"}': 90,
        'pegainfer:kv_tier_blocks{tier="host"}': 4,
        'pegainfer:kv_tier_transfers{tier="host"}': 2,
        'pegainfer:kv_tier_loaded_bytes_total{tier="host"}': 7,
        'pegainfer:kv_tier_refused_loads_total{tier="host"}': 3,
        'pegainfer:kv_tier_hit_tokens_total{tier="disk"}': 32,
        'pegainfer:kv_tier_saved_bytes_total{tier="disk"}': 5,
        'pegainfer:kv_tier_saved_seconds_total{tier="disk"}': 0.5,
        'pegainfer:kv_tier_failures_total{tier="disk"}': 1,
    }
