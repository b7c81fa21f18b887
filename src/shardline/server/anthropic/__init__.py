"""Anthropic's Messages API, which coding agents speak."""
