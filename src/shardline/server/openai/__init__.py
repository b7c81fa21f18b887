"""OpenAI's endpoints. Each file holds the protocol of one endpoint and its handler."""
