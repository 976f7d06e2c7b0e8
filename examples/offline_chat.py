"""Answers one conversation, then several at once, with what the model itself says of sampling."""

from pegainfer import LLM

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "What is the capital of France?"},
]


def main() -> None:
    llm = LLM(model="SmolLM2-135M-Instruct", max_model_len=2048)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 40
    sampling_params.temperature = 0.0

    outputs = llm.chat(CONVERSATION, sampling_params, use_tqdm=False)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")

    # A list of conversations is a batch.
    outputs = llm.chat([CONVERSATION for _ in range(4)], sampling_params, use_tqdm=True)
    print(len(outputs), "answers,", len({output.outputs[0].text for output in outputs}), "different")


if __name__ == "__main__":
    main()
