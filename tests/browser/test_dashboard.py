"""The dashboard over live figures, on the browser's clock."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from pegainfer.observe.trace import RingBuffer
from tests.browser.conftest import Opener
from tests.null.observe.test_explain import record, step, steps_with
from tests.support.page_server import PageServer, page_server


@pytest.fixture(params=["pegainfer:", "vllm:"])
def metered(request: pytest.FixtureRequest) -> Iterator[PageServer]:
    with page_server(metrics_prefix=request.param) as server:
        yield server


DRAWN = """() => document.querySelector(".plot").getAttribute("aria-valuetext")
  .startsWith(new Date().toLocaleTimeString())"""
START = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)


def board(opened: Opener, server: PageServer) -> Page:
    """The dashboard at a minute past the start, with time standing still and nothing gained so far."""
    page = opened(server.url)
    page.clock.install(time=START)
    page.goto(server.url + "/dashboard")
    expect(page.locator("#state")).to_have_text("demo-model on none, every 2 s")
    with page.expect_response("**/metrics"):
        page.clock.pause_at(START + datetime.timedelta(seconds=60))
    page.wait_for_function(DRAWN)
    scrape(page)
    return page


def scrape(page: Page) -> None:
    """Two seconds pass, and what was asked then is drawn."""
    with page.expect_response("**/metrics"):
        page.clock.run_for(2000)
    page.wait_for_function(DRAWN)


def tile(page: Page, name: str) -> Any:
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator("dd")


def test_gauges_rates_and_quantiles(opened: Opener, metered: PageServer) -> None:
    page = board(opened, metered)
    expect(tile(page, "Running")).to_have_text("0")
    expect(tile(page, "Prefix hits")).to_have_text("–")
    metrics = metered.app.front.metrics
    for _ in range(100):
        metrics.first_token.observe(0.15)
        metrics.inter_token.observe(0.02)
    metrics.reject("overloaded")
    metered.stats(
        running=5,
        waiting=3,
        total_blocks=200,
        free_blocks=50,
        prompt_tokens=4000,
        generation_tokens=2000,
        prefix_queries=4000,
        prefix_hits=1000,
        kind_steps={"decode": 90, "mixed": 10},
        kind_seconds={"decode": 0.9, "mixed": 0.6},
    )
    scrape(page)
    for name, text in {
        "Running": "5",
        "Waiting": "3",
        "KV in use": "75%",
        "Prefix hits": "25%",
        "Tokens/s out": "500",  # over the four seconds since the first scrape here
        "Tokens/s in": "1,000",
        "First token p50": "125 ms",  # in the middle of the bucket from 100 to 150
        "Token gap p50": "18 ms",
    }.items():
        expect(tile(page, name)).to_have_text(text)
    row = page.locator("#latency tr", has_text="Time to first token").locator("td")
    expect(row).to_have_text(["125 ms", "145 ms", "150 ms"] * 2)
    expect(page.locator("#ranges tr", has_text="Step: mean").locator("td").first).to_have_text("15 ms")
    expect(page.locator("#counts")).to_contain_text("Refused: overloaded1")
    for k in range(1, 32):  # a minute on, the same total means nothing happened
        metered.stats(running=k % 3, total_blocks=200, prompt_tokens=4000, generation_tokens=2000)
        scrape(page)
    expect(tile(page, "Tokens/s out")).to_have_text("0")
    expect(tile(page, "First token p50")).to_have_text("–")
    expect(row).to_have_text(["–", "–", "–", "125 ms", "145 ms", "150 ms"])
    expect(page.locator("#ranges tr", has_text="queue: running").locator("td")).to_have_text(["1", "0", "5"])


def test_a_real_answer_shows(opened: Opener, metered: PageServer) -> None:
    page = board(opened, metered)
    page.evaluate(
        """() => fetch("/v1/completions", {
          method: "POST", headers: { "content-type": "application/json" }, body: '{"prompt": "x"}',
        }).then(response => response.json())"""
    )
    scrape(page)
    expect(page.locator("#counts tr", has_text="ended: stop").locator("td")).to_have_text("1")
    expect(tile(page, "First token p50")).to_have_text(re.compile(r"\d ms$"))


def test_charts_can_be_read_off_by_keys_and_pointer(opened: Opener, server: PageServer) -> None:
    page = board(opened, server)
    for running in (1, 2, 7):
        server.stats(running=running, total_blocks=1)
        scrape(page)
    expect(tile(page, "Running")).to_have_text("7")
    plot = page.get_by_role("slider", name="Batch and queue, time")
    expect(plot).to_have_attribute("aria-valuetext", re.compile("running 7, waiting 0"))
    plot.focus()
    page.keyboard.press("ArrowLeft")
    expect(plot).to_have_attribute("aria-valuetext", re.compile("running 2, waiting 0"))
    page.keyboard.press("Home")
    expect(plot).to_have_attribute("aria-valuetext", re.compile("running 0, waiting 0"))
    page.locator("#theme").focus()
    expect(plot).to_have_attribute("aria-valuetext", re.compile("running 7, waiting 0"))
    box = plot.bounding_box()
    assert box is not None
    width_of_a_point = box["width"] / 150
    plot.hover(position={"x": box["width"] - 2 * width_of_a_point, "y": 10})
    expect(plot).to_have_attribute("aria-valuetext", re.compile("running 1, waiting 0"))
    assert page.locator("figure", has=plot).locator(".line.series-1").get_attribute("d")


def test_pause_asks_no_more(opened: Opener, server: PageServer) -> None:
    page = board(opened, server)
    page.click("#pause")
    expect(page.locator("#state")).to_have_text("Paused")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(20_000)
    page.evaluate("() => fetch('/health')")  # a round trip: what was on its way has been seen
    assert [url.rsplit("/", 1)[1] for url in asked] == ["health"]
    with page.expect_response("**/metrics"):
        page.click("#pause")
    expect(page.locator("#state")).to_have_text("demo-model on none, every 2 s")


def test_a_server_that_is_gone_and_one_that_began_anew(opened: Opener, server: PageServer) -> None:
    page = board(opened, server)
    server.stats(running=1, generation_tokens=500, prompt_tokens=500, total_blocks=1)
    scrape(page)
    scrape(page)
    page.context.set_offline(True)
    with page.expect_event("requestfailed"):
        page.clock.run_for(2000)
    expect(page.locator("#failure")).to_contain_text("The server did not answer.")
    expect(page.locator("#state")).to_contain_text("No figures since")
    page.context.set_offline(False)
    server.stats(running=1, generation_tokens=20, prompt_tokens=20, total_blocks=1)
    scrape(page)
    expect(page.locator("#failure")).to_be_hidden()
    expect(tile(page, "Tokens/s out")).to_have_text("–")  # not minus 240
    expect(page.locator("#ranges tr", has_text="queue: running").locator("td")).to_have_text(["1", "1", "1"])


PARSE = """async text => {
  const { parseMetrics, quantileOf } = await import("/static/dashboard/metrics.js");
  const parsed = [...parseMetrics(text)];
  const after = new Map([[1, 10], [2, 30], [Infinity, 40]]);
  const quantiles = [0.1, 0.25, 0.5, 0.75, 0.9].map(q => quantileOf(after, null, q));
  const of = pairs => quantileOf(new Map(pairs), null, 0.5);
  return [parsed, quantiles, of([[1, 0], [Infinity, 0]]), of([])];
}"""


def test_prometheus_text(opened: Opener, server: PageServer) -> None:
    text = (
        "# HELP x:a Words.\n# TYPE x:a gauge\n"
        'x:num_requests_running{model_name="a\\"b\\\\c,d}"} 3.0\nx:plain 1e3 1700000000\nother_total 2\n'
        'x:h_bucket{le="+Inf",m="1"} 4\nbroken{ 1\n'
    )
    parsed, quantiles, empty, none = opened(server.url + "/dashboard").evaluate(PARSE, text)
    assert parsed == [
        ["num_requests_running", [{"labels": {"model_name": 'a"b\\c,d}'}, "value": 3}]],
        ["plain", [{"labels": {}, "value": 1000}]],
        ["other_total", [{"labels": {}, "value": 2}]],
        ["h_bucket", [{"labels": {"le": "+Inf", "m": "1"}, "value": 4}]],
    ]
    assert quantiles == [0.4, 1, 1.5, 2, 2]
    assert empty is None and none is None


def test_slow_requests_are_shown_while_a_trace_is_taken(opened: Opener) -> None:
    buffer = RingBuffer()
    with page_server(buffer=buffer) as server:
        page = board(opened, server)
        expect(page.locator("#slow-title")).to_be_hidden()
        buffer.steps(steps_with(50, step(50, device=0.3)))
        buffer(record(id="held-up"))
        assert server.app.front.tracing is not None
        server.call(server.app.front.tracing.start)
        scrape(page)
        expect(page.locator("#slow-title")).to_be_visible()
        row = page.locator("#slow tbody tr")
        expect(row).to_have_count(1)
        expect(row.locator("th")).to_contain_text("held-up")
        expect(row.locator("td")).to_contain_text(["1.03", "290", "slow device", "step 50 took the device"])
