"""Endpoints of models that embed or classify, and scores of pairs of texts."""
