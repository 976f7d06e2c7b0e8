"""Answers that are shown while they are written."""

import asyncio

from pegainfer import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

PROMPTS = ["The future of artificial intelligence is", "In a galaxy far, far away", "The key to happiness is"]


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    print(f"\nPrompt: {prompt!r}\nAnswer: ", end="", flush=True)
    sampling_params = SamplingParams(
        max_tokens=40,
        temperature=0.8,
        top_p=0.95,
        seed=42,
        output_kind=RequestOutputKind.DELTA,  # what is new since the output before
    )
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=sampling_params
    ):
        for completion in output.outputs:
            print(completion.text, end="", flush=True)
        if output.finished:
            print("\nfinished")


async def main() -> None:
    engine_args = AsyncEngineArgs(model="SmolLM2-135M-Instruct", enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        for i, prompt in enumerate(PROMPTS, 1):
            await stream_response(engine, prompt, f"stream-example-{i}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
