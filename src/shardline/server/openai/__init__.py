"""OpenAI's endpoints, one file each: the protocol and its handler side by side."""
