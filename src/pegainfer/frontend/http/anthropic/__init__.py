"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's shape on the way that chat takes."""
