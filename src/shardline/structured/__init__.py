"""Grammars that constrain an answer: how they are written, refused, compiled and followed. No torch."""
