"""Prompts rendered apart from where they run: token ids in, token ids out, as vLLM's scale-out endpoints have it."""
