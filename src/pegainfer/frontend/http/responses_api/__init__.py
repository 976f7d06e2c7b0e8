"""OpenAI's responses API: /v1/responses and what is stored of its answers."""
