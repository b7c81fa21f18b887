"""Receipts of answers: what an answer depended on, and digests by which anyone can check it on any layout."""
