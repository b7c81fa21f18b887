"""What a sandbox's worker does with grammars: llguidance reads them, and tries the first token of each.

A job is one character and a body: `PARAMS` and the JSON of StructuredOutputsParams, or `GRAMMAR` and a grammar's text.
The answer is one character and a text: `TAKEN` and the grammar, or `REFUSED` and what it lacks.
"""

from __future__ import annotations

import msgspec

from shardline.sampling_params import StructuredOutputsParams
from shardline.sandbox.nursery import Service
from shardline.structured.grammar import check_grammar, load_compiler, schema_grammar, structured_grammar
from shardline.structured.structural_tags import structural_tag_grammar

PARAMS, GRAMMAR = b"p", b"g"
TAKEN, REFUSED = b"t", b"r"
_MAX_REASON_CHARS = 2000


def open_service(argument: str) -> Service:
    """The service; `argument` has no meaning."""
    load_compiler()
    check_grammar(schema_grammar({"type": "object"}))  # the first one takes longer
    return _serve


def _serve(body: bytes) -> bytes:
    kind, content = body[:1], body[1:]
    try:
        if kind == PARAMS:
            grammar = _write_grammar(msgspec.json.decode(content, type=StructuredOutputsParams))
        else:
            grammar = content.decode()
        check_grammar(grammar)
    except MemoryError:
        raise
    except RecursionError:
        return REFUSED + b"it is nested too deeply"
    except ValueError as error:
        return REFUSED + str(error)[:_MAX_REASON_CHARS].encode()
    except BaseException as error:  # a panic of the compiler is no Exception
        return REFUSED + f"the compiler of grammars fails on it: {error}"[:_MAX_REASON_CHARS].encode()
    return TAKEN + (grammar.encode() if kind == PARAMS else b"")


def _write_grammar(params: StructuredOutputsParams) -> str:
    if params.structural_tag is not None:
        return structural_tag_grammar(params.structural_tag, params)
    return structured_grammar(params)
