"""One vector a prompt."""

from pegainfer import LLM

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


def main() -> None:
    llm = LLM(model="SmolLM2-135M-Instruct", runner="pooling", enforce_eager=True)
    outputs = llm.embed(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        embedding = output.outputs.embedding
        short = ", ".join(f"{value:.3f}" for value in embedding[:4])
        print(f"Prompt: {prompt!r} | Embedding: [{short}, ...] (size={len(embedding)})")


if __name__ == "__main__":
    main()
