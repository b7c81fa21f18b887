"""Parts of scripts/record_digests.py: the engines, the cases, the requests."""
