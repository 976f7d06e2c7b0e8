"""pegainfer bench perplexity: how well a model predicts a text, and what its quantisation costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegainfer.app.config import EngineConfig
from pegainfer.app.options import name_of
from pegainfer.cli.flags import Given, flag_of
from pegainfer.cli.target import MODEL_HELP, ModelFlags, choose
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from pegainfer.app.offline import LLM


@dataclass(frozen=True, kw_only=True)
class PerplexityFlags:
    text: str = field(default="", metadata={"help": "File of plain text in UTF-8."})
    tokens: int = field(default=4000, metadata={"help": "Tokens of the text, from its beginning."})
    window: int = field(
        default=2000, metadata={"help": "Tokens of each prompt; prompts follow each other without overlap."}
    )
    output: str = field(
        default="bench/results/perplexity.jsonl", metadata={"help": "File to append JSON lines to."}
    )

    def __post_init__(self) -> None:
        if not self.text:
            raise ConfigError("a text is missing", expected="a file of plain text", where="--text")
        if min(self.tokens, self.window) < 2:
            raise ConfigError("sizes of a bench", expected="≥ 2", got=(self.tokens, self.window))


def perplexity(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    *,
    bench: PerplexityFlags,
    flags: ModelFlags,
    engine: EngineConfig,
    given: Given,
) -> int:
    """Measure the perplexity of a text: e to the mean negative log-probability of its tokens."""
    import math

    from pegainfer.app.offline import LLM
    from pegainfer.cli.machine import append_result, num_cores, provenance

    target = choose(model, flags, engine, SchedulerConfig(), given)
    if target.model is None:
        raise ConfigError("the null device has no perplexity", remedy="choose --device cpu")
    words = _read(Path(bench.text))
    options = {name_of(f.name): getattr(engine, f.name) for f in dataclasses.fields(engine)
               if flag_of(f) in given}  # fmt: skip
    options |= {"device": target.spec.engine.backend, "max_model_len": bench.window + 1}
    with LLM(str(target.model.path), **options) as llm:
        ids = llm.get_tokenizer().encode(words)[: bench.tokens]
        sums = [_nll(llm, ids[i : i + bench.window]) for i in range(0, len(ids), bench.window)]
    count = sum(n for _, n in sums)
    if not count:
        raise ConfigError("the text is too short", expected="2 tokens", got=len(ids), where=bench.text)
    mean = sum(nll for nll, _ in sums) / count
    print(f"{target.spec.name}: perplexity {math.exp(mean):.4f} ({mean:.4f} nat a token) over {count} tokens")
    row: dict[str, Any] = {**provenance(num_cores()), "bench": "perplexity", "model": target.spec.name}
    row |= {"device": flags.device, "quantization": engine.quantization, "activation": engine.activation}
    row |= {"text": Path(bench.text).name, "window": bench.window, "predicted": count}
    append_result(Path(bench.output), {**row, "nll": round(mean, 6), "perplexity": round(math.exp(mean), 4)})
    return 0


def _read(path: Path) -> str:
    """Raises ConfigError where the file cannot be read as text."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError("the text cannot be read", got=str(e), where="--text") from None


def _nll(llm: LLM, ids: list[int]) -> tuple[float, int]:
    """Sum of negative log-probabilities, in nat, of the tokens after the first, and their number."""
    from pegainfer.app.sampling_params import SamplingParams

    if len(ids) < 2:
        return 0.0, 0
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    entries = output.prompt_logprobs or []
    found = [e[i].logprob for i, e in zip(ids[1:], entries[1:], strict=True) if e is not None]
    return -sum(found), len(found)
