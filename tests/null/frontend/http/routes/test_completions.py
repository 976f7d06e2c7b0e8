from __future__ import annotations

from typing import Any

import pytest

from pegainfer.contract.request import SamplingParams, hash_blocks, root_hash, unpack_tokens
from pegainfer.frontend.tokenizer import Tokenizer
from tests.support.asgi import ask
from tests.support.fake_engine import FakeEngine, logprob_of, says

PATH = "/v1/completions"


def complete(script: Any = "hello", /, **body: Any) -> tuple[dict[str, Any], FakeEngine]:
    """The answer to a request that must succeed, and the engine that it went to."""
    engine = FakeEngine(says(script) if isinstance(script, str) else script)
    response = ask(engine, PATH, body)
    assert response.status_code == 200, response.text
    return response.json(), engine


def refuse(**body: Any) -> dict[str, Any]:
    """The error of a request that must be refused before the engine sees it."""
    engine = FakeEngine()
    response = ask(engine, PATH, body)
    assert response.status_code == 400, response.text
    assert not engine.requests
    error: dict[str, Any] = response.json()["error"]
    return error


def test_an_answer_has_openais_shape() -> None:
    answer, _ = complete("hello", prompt="hi", max_tokens=5, model="fake")
    assert answer["id"].startswith("cmpl-")
    assert isinstance(answer["created"], int)
    del answer["id"], answer["created"]
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_the_projects_defaults() -> None:
    answer, engine = complete(prompt="hi")
    assert engine.requests[0].sampling == SamplingParams(temperature=0.0, top_k=50, top_p=1.0, max_tokens=128)
    assert answer["usage"]["completion_tokens"] == 128


def test_openais_defaults_by_a_switch() -> None:
    engine = FakeEngine()
    assert ask(engine, PATH, {"prompt": "hi"}, openai_defaults=True).status_code == 200
    assert engine.requests[0].sampling == SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=16)


def test_null_means_absent() -> None:
    import msgspec

    from pegainfer.frontend.http.routes.completions import CompletionRequest

    names = [f.name for f in msgspec.structs.fields(CompletionRequest) if f.name != "prompt"]
    _, engine = complete(prompt="hi", **dict.fromkeys(names))
    assert engine.requests[0].sampling == SamplingParams(temperature=0.0, top_k=50, max_tokens=128)


def test_every_sampling_field_arrives() -> None:
    _, engine = complete(
        prompt="hi",
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=-5,
        stop_token_ids=[65, 66, 65],
        ignore_eos=True,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"10": -100, "11": 100},
        allowed_token_ids=[3, 1, 2, 3],
        bad_words=["no"],
        logprobs=2,
        prompt_logprobs=1,
        priority=-3,
        cache_salt="s",
        timeout=60,
    )
    request = engine.requests[0]
    assert request.sampling == SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=-5,
        stop_token_ids=(65, 66),
        ignore_eos=True,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias=((10, -100.0), (11, 100.0)),
        allowed_token_ids=(1, 2, 3),
        bad_words=(tuple(b"no"), tuple(b" no")),
        logprobs=2,
        prompt_logprobs=1,
    )
    assert request.eos_token_ids == (257,)
    assert (request.priority, request.cache_salt) == (-3, "s")
    assert request.deadline == pytest.approx(request.arrival + 60)


def test_block_hashes_are_the_contracts() -> None:
    prompt = "x" * 40
    _, engine = complete(prompt=prompt, cache_salt="salt")
    request = engine.requests[0]
    assert request.block_size == 16
    assert request.block_hashes == b"".join(hash_blocks(request.prompt, 16, parent=root_hash(None, "salt")))
    assert len(request.block_hashes) == 2 * 32


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hé", [list("hé".encode())]),
        ([1, 2, 3], [[1, 2, 3]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a"], [[97]]),
        ("<|im_start|>", [[256]]),
    ],
)
def test_the_four_kinds_of_prompt(prompt: Any, ids: list[list[int]]) -> None:
    answer, engine = complete(prompt=prompt, max_tokens=1)
    assert [unpack_tokens(r.prompt) for r in engine.requests] == ids
    assert [c["index"] for c in answer["choices"]] == list(range(len(ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        (["a", ""], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        (["a", 1], "prompt"),
        ([1, "a"], "prompt"),
        ([[1], "a"], "prompt"),
        ([1, [1]], "prompt"),
        (None, "prompt"),
        ([1.0], "prompt[0]"),
        ([True], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([0, 258], "prompt[1]"),
        ([2**31], "prompt[0]"),
        ([10**30], "prompt[0]"),
        ([[5], [5, -1]], "prompt[1][1]"),
        ({"text": "a"}, "prompt"),
    ],
)
def test_bad_prompts_are_named(prompt: Any, param: str) -> None:
    error = refuse(prompt=prompt)
    assert error["param"] == param


def test_the_context_bounds_the_prompt_and_both_lengths_are_told() -> None:
    answer, _engine = complete(prompt="x" * 255, max_tokens=50)
    assert answer["usage"]["completion_tokens"] == 1  # the context of 256 has room for one
    assert answer["choices"][0]["finish_reason"] == "length"
    error = refuse(prompt="x" * 256)
    assert error["code"] == "context_length_exceeded"
    assert "expected ≤ 255 tokens" in error["message"]
    assert "got 256" in error["message"]


def test_what_is_far_too_long_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        asked.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    error = refuse(prompt="x" * 5000)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "expected ≤ 255 tokens (the context of 256 less one to generate)" in error["message"]
    assert "got at least 5000 in 5000 characters; shorten it" in error["message"]
    assert asked == []
    answer, _engine = complete(prompt="<|im_start|>" * 255, max_tokens=1)  # 3,060 characters, which fit
    assert answer["usage"]["prompt_tokens"] == 255
    assert asked == [3060]


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    _, engine = complete(prompt="abcdef", truncate_prompt_tokens=2)
    assert unpack_tokens(engine.requests[0].prompt) == list(b"ef")
    _, engine = complete(prompt="x" * 500 + "y", truncate_prompt_tokens=-1)
    assert unpack_tokens(engine.requests[0].prompt) == list(b"x" * 254 + b"y")
    for bad in (0, -2, 256):
        assert refuse(prompt="abc", truncate_prompt_tokens=bad)["param"] == "truncate_prompt_tokens"


def test_n_choices_of_several_prompts_are_numbered_through() -> None:
    script = lambda request, index: list(request.prompt[:1] * 2 + bytes([48 + index]))  # noqa: E731
    answer, engine = complete(script, prompt=["a", "b"], n=2, max_tokens=3)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "aa0"),
        (1, "aa1"),
        (2, "bb0"),
        (3, "bb1"),
    ]
    assert [r.n for r in engine.requests] == [2, 2]
    assert len({r.id for r in engine.requests}) == 2
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_cached_tokens_are_told() -> None:
    answer, _ = complete(prompt="x" * 40, max_tokens=2)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_eos_ends_with_stop() -> None:
    answer, _ = complete(lambda r, i: [97, 257], prompt="hi")
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
    assert answer["usage"]["completion_tokens"] == 2


def test_a_stop_string_cancels_in_the_engine_and_truncates_usage() -> None:
    answer, engine = complete("one, two, three", prompt="hi", stop=[", t", "zzz"])
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", ", t")
    assert answer["usage"]["completion_tokens"] == 6
    assert engine.cancelled == [engine.requests[0].id]
    assert engine.num_live == 0


def test_the_engine_is_told_once_to_end_a_request() -> None:
    class Slow(FakeEngine):
        def cancel(self, request_id: str, index: int | None = None) -> None:
            self.cancelled.append(request_id)  # the ABORT comes much later

    engine = Slow(says("a.b"))
    answer = ask(engine, PATH, {"prompt": "hi", "stop": "."}).json()
    assert answer["choices"][0]["text"] == "a"
    assert engine.cancelled == [engine.requests[0].id]


def test_one_stopped_choice_leaves_the_others_running() -> None:
    answer, engine = complete(
        lambda r, i: list(b"a.b" if i == 0 else b"abcd"), prompt="hi", n=2, stop=".", max_tokens=4
    )
    assert [c["text"] for c in answer["choices"]] == ["a", "abcd"]
    assert engine.cancelled_indices == [(engine.requests[0].id, 0)]  # its slot is for others at once
    assert engine.cancelled == []
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop", "length"]


def test_stop_may_be_one_string_and_can_be_shown() -> None:
    answer, _ = complete("abc", prompt="hi", stop="b", include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == "ab"


def test_logprobs_stand_beside_their_tokens() -> None:
    answer, _ = complete("aé", prompt="hi", max_tokens=3, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.25, -0.25, -0.25]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["top_logprobs"][0] == {"a": -0.25, "b": -0.5}


def test_logprobs_zero_gives_the_drawn_tokens_alone() -> None:
    answer, engine = complete("ab", prompt="hi", max_tokens=2, logprobs=0)
    assert engine.requests[0].sampling.logprobs == 0
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": None,
        "text_offset": [0, 1],
    }


def test_echo_puts_the_prompt_before_each_choice() -> None:
    answer, _ = complete("xy", prompt=["héllo", "b"], echo=True, max_tokens=2)
    assert [c["text"] for c in answer["choices"]] == ["hélloxy", "bxy"]
    answer, _ = complete("xy", prompt=list("é".encode()), echo=True, max_tokens=2)
    assert answer["choices"][0]["text"] == "éxy"


def test_echo_with_logprobs_covers_the_prompt() -> None:
    answer, engine = complete("xy", prompt="hé!", echo=True, logprobs=1, max_tokens=2)
    assert engine.requests[0].sampling.prompt_logprobs == 1
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "!", "x", "y"]
    assert logprobs["token_logprobs"] == [None, *[-0.25] * 5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]


def test_echo_shows_special_tokens_that_the_prompt_spells_and_counts_them() -> None:
    answer, _ = complete("xy", prompt="a<|im_end|>b", echo=True, logprobs=1, max_tokens=2)
    choice = answer["choices"][0]
    assert choice["text"] == "a<|im_end|>bxy"
    assert choice["logprobs"]["tokens"] == ["a", "<|im_end|>", "b", "x", "y"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 11, 12, 13]


@pytest.mark.parametrize(
    ("skip", "text", "offsets"),
    [(None, "abxy", [0, 1, 1, 2, 3]), (False, "a<|im_end|>bxy", [0, 1, 11, 12, 13])],
)
def test_echo_of_token_ids_skips_special_tokens_where_the_answer_does(
    skip: bool | None, text: str, offsets: list[int]
) -> None:
    answer, _ = complete(
        "xy", prompt=[97, 257, 98], echo=True, logprobs=1, max_tokens=2, skip_special_tokens=skip
    )
    choice = answer["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


def test_scoring_a_text_generates_nothing() -> None:
    answer, engine = complete(prompt="abc", echo=True, logprobs=1, max_tokens=0)
    assert engine.requests[0].sampling.max_tokens == 0
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert len(choice["logprobs"]["tokens"]) == 3
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_and_prompt_logprobs_each_have_their_own_number() -> None:
    answer, engine = complete(prompt="ab", echo=True, logprobs=1, prompt_logprobs=3, max_tokens=1)
    assert engine.requests[0].sampling.prompt_logprobs == 3
    choice = answer["choices"][0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1, 1]
    assert len(choice["prompt_logprobs"][1]) == 3


def test_prompt_logprobs_in_vllms_shape() -> None:
    answer, _ = complete(prompt="ab", prompt_logprobs=2, max_tokens=1)
    own = logprob_of(98, 2)
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": own.logprob, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -0.5, "rank": 2, "decoded_token": "c"},
        },
    ]


def test_token_ids_on_request() -> None:
    answer, _ = complete(lambda r, i: [97, 257], prompt="hi", return_token_ids=True, logprobs=0)
    choice = answer["choices"][0]
    assert choice["token_ids"] == [97, 257]
    assert choice["prompt_token_ids"] == [104, 105]
    assert len(choice["logprobs"]["tokens"]) == 2  # aligned with the ids, EOS included


@pytest.mark.parametrize(
    ("ids", "tokens", "offsets"),
    [(True, ["a", "b", "c", "d"], [0, 1, 2, 2]), (None, ["a", "b"], [0, 1])],
)
def test_logprobs_align_with_token_ids_where_a_stop_string_is_cut_away(
    ids: bool | None, tokens: list[str], offsets: list[int]
) -> None:
    answer, _ = complete("abcdef", prompt="hi", stop="cd", return_token_ids=ids, logprobs=0, max_tokens=6)
    choice = answer["choices"][0]
    assert (choice["text"], answer["usage"]["completion_tokens"]) == ("ab", 4)
    assert choice.get("token_ids") == ([97, 98, 99, 100] if ids else None)
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (tokens, offsets)


def test_special_tokens_are_skipped_or_shown() -> None:
    script = lambda r, i: [97, 256, 98]  # noqa: E731
    assert complete(script, prompt="hi", max_tokens=3)[0]["choices"][0]["text"] == "ab"
    shown, _ = complete(script, prompt="hi", max_tokens=3, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "a<|im_start|>b"


def test_the_clients_id_is_used_and_must_be_sane() -> None:
    answer, engine = complete(prompt="hi", request_id="my-id", max_tokens=1)
    assert answer["id"] == "cmpl-my-id"
    assert engine.requests[0].id.startswith("my-id ")
    for bad in ("", "a b", "a\nb", "é", "x" * 129):
        assert refuse(prompt="hi", request_id=bad)["param"] == "request_id"


def test_top_k_off_by_zero_and_minus_one() -> None:
    for value in (0, -1):
        _, engine = complete(prompt="hi", top_k=value)
        assert engine.requests[0].sampling.top_k == 0
    assert refuse(prompt="hi", top_k=-2)["param"] == "top_k"


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    _, engine = complete(prompt="hi", temperature=1e-9)
    assert engine.requests[0].sampling.temperature == 0.0


def test_an_unknown_model_is_a_404() -> None:
    engine = FakeEngine()
    response = ask(engine, PATH, {"prompt": "hi", "model": "gpt-4"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert not engine.requests


def test_what_the_engine_refuses_comes_back_as_it_is() -> None:
    from pegainfer.contract.errors import EngineDeadError, QueueFullError, RequestError

    for error, status, code in (
        (RequestError("too long", param="prompt"), 400, None),
        (QueueFullError("full", retry_after=3.0), 503, "overloaded"),
        (EngineDeadError("gone"), 503, "engine_dead"),
    ):
        engine = FakeEngine()
        engine.refuse = error
        response = ask(engine, PATH, {"prompt": "hi"})
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert response.json()["error"]["message"] == str(error)
        if status == 503:
            assert int(response.headers["retry-after"]) >= 1


def test_a_bug_is_a_500_that_tells_nothing() -> None:
    engine = FakeEngine()
    engine.refuse = ValueError("/secret/path 0x7f00")
    response = ask(engine, PATH, {"prompt": "hi"})
    assert response.status_code == 500
    assert "secret" not in response.text
