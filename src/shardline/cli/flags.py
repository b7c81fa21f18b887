"""Command-line flags from configuration dataclasses: every field with `option(...)` becomes a flag."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from shardline import env
from shardline.cli.words import expand_words
from shardline.config.engine import EngineConfig
from shardline.config.fields import parse_count
from shardline.config.vllm import VllmOption, options_from_variables, vllm_options
from shardline.log import configure_logging

logger = logging.getLogger(__name__)

USAGE_ERROR = 2
"""Exit code for a user's mistake."""

_LEAST_LIKENESS = 0.75
"""Similarity (0 to 1, by difflib) from which a known flag is suggested for an unknown one."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors and no abbreviations; it reads --max_model_len as --max-model-len.

    `add_flags` is called when the flags are needed: a command whose flags take long to import does not delay others.
    """

    def __init__(self, *args: Any, add_flags: Callable[[Parser], None] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._deferred: list[Callable[[Parser], None]] = [] if add_flags is None else [add_flags]

    def defer(self, add_flags: Callable[[Parser], None]) -> None:
        """Have further flags added when they are needed."""
        self._deferred.append(add_flags)

    def complete(self) -> None:
        """Add the flags now, if this has not been done."""
        deferred, self._deferred = self._deferred, []
        for add_flags in deferred:
            add_flags(self)

    def format_help(self) -> str:
        self.complete()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        print(f"shardline: error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(USAGE_ERROR)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in the base class, but the innermost parser refuses unknown arguments and says what would work."""
        self.complete()
        words = [_with_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        if self._subparsers is None:  # the innermost
            try:
                words = expand_words(words, self._option_string_actions)
            except ValueError as error:
                self.error(str(error))
        known, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._explain_unknown(unknown[0]))
        return known, unknown

    def _explain_unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}"
        flag = word.split("=")[0]
        name = flag.lstrip("-")
        # Compared without the dashes, which would make every pair of short flags look alike.
        known = {option.lstrip("-"): option for option in self._option_string_actions}
        close = [known[match] for match in difflib.get_close_matches(name, known, n=3, cutoff=_LEAST_LIKENESS)]
        return f"unknown option {flag}" + (f"; did you mean {' or '.join(close)}?" if close else "")


def add_flags(parser: argparse.ArgumentParser, config: type[Any], title: str, skip: Sequence[str] = ()) -> None:
    """Add a flag for every field of a configuration dataclass, except for the fields in `skip`.

    A flag that the user leaves out adds nothing to the namespace, so that only the dataclass holds the defaults.
    """
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(config):
        if field.name not in skip:
            _add_flag(group, field)


def add_engine_flags(parser: Parser) -> None:
    """Add the flags of EngineConfig, grouped by its parts, and the model as an optional positional argument."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=_model_help())
    parser.defer(_add_engine_flags)


def _add_engine_flags(parser: Parser) -> None:
    for part in dataclasses.fields(EngineConfig):
        assert isinstance(part.default_factory, type)
        add_flags(parser, part.default_factory, part.name)
    parser.add_argument(
        "--config",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML file with flags, such as 'port: 8001'; those of the command line come first",
    )
    _add_vllm_flags(parser)


def _add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Take the flags that only vLLM has, as `config/vllm.toml` says; --help does not show them."""
    known = parser._option_string_actions
    for option in vllm_options().values():
        dashes = "-" if len(option.name) <= 3 else "--"
        names = [dashes + option.name, *([f"--no-{option.name}"] if option.takes == "switches" else ())]
        counts: dict[str, Any] = {"switches": 0, "values": None, "lists": "+"}
        if option.takes != "keywords" and names[0] not in known:
            parser.add_argument(*names, action=_VllmFlag, nargs=counts[option.takes], option=option)


class _VllmFlag(argparse.Action):
    """A flag of vLLM that Shardline does not have."""

    def __init__(self, option_strings: Sequence[str], dest: str, option: VllmOption, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, help=argparse.SUPPRESS, **options)
        self._option = option

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        flag = option_string or self.option_strings[0]
        if flag.startswith("--no-") and self._option.treatment == "refused":
            return  # that is so anyway
        try:
            line = self._option.take(values, flag)
        except ValueError as error:
            parser.error(str(error))
        if line:
            namespace.vllm_notes = [*getattr(namespace, "vllm_notes", ()), line]


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine configuration that the flags describe; the log names the flags of vLLM that have no effect.

    Raises:
        ValueError: a value is out of its range.
    """
    if hasattr(args, "vllm_notes"):
        configure_logging()
        for line in args.vllm_notes:
            logger.info("%s", line)
    parts = [part.default_factory for part in dataclasses.fields(EngineConfig)]
    given = {k: v for part in parts for k, v in fields_from_flags(args, part).items()}
    return EngineConfig.from_options(**{**options_from_variables(env.vllm_variables()), **given})


def fields_from_flags(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """The fields of the dataclass `config` that the user set by flags; lists become tuples."""
    names = [field.name for field in dataclasses.fields(config)]
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    names = ["--" + field.name.replace("_", "-")]
    names += ["-" + alias if len(alias) <= 3 else "--" + alias for alias in field.metadata["aliases"]]
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(field)}
    kind = str(field.type)
    if kind == "bool":
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = field.name.rsplit("_", 1)[-1].upper()
        if kind.startswith("tuple"):
            options.update(nargs="+", action="extend")
        else:
            options["type"] = _reader(kind)
            if field.metadata["alone"] is not None:
                options.update(nargs="?", const=field.metadata["alone"])
        if field.metadata["choices"]:
            del options["metavar"]
            options["choices"] = _Choices(field.metadata["choices"], field.metadata["refused"])
    group.add_argument(*names, **options)


class _Choices(tuple[str, ...]):
    """What help and messages show of a flag's values; `refused` ones are taken as well, for a better message later."""

    def __new__(cls, shown: Sequence[str], refused: Sequence[str]) -> _Choices:
        made = super().__new__(cls, shown)
        made._refused = refused
        return made

    _refused: Sequence[str]

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or value in self._refused


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata["help"])
    if field.default is not None and field.default != () and field.default != "":
        text += f" (default: {field.default})"
    return text.replace("%", "%%")


def _model_help() -> str:
    fields = {field.name: field for field in dataclasses.fields(EngineConfig().model)}
    return _help(fields["model"])


def _reader(kind: str) -> Callable[[str], Any]:
    """The function that turns a word of the command line into a field of type `kind`, such as "int | str | None"."""
    kinds = {name.strip() for name in kind.split("|")} - {"None"}
    if kinds == {"int", "str"}:
        return _int_or_text
    readers: dict[str, Callable[[str], Any]] = {"int": _count, "float": float, "str": str}
    (name,) = kinds
    return readers[name]


def _count(word: str) -> int:
    try:
        return parse_count(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {word!r}") from None


def json_value(text: str) -> Any:
    """The value of a flag that takes JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not JSON: {error}") from None


def _int_or_text(word: str) -> int | str:
    try:
        return int(word)
    except ValueError:
        return word


def _with_dashes(word: str) -> str:
    """--max_model_len=a_b becomes --max-model-len=a_b: only the flag's own underscores change."""
    if not word.startswith("--"):
        return word
    name = re.match(r"[^.=]*", word)
    assert name is not None
    return name[0].replace("_", "-") + word[name.end() :]


def add_refused_flags(parser: argparse.ArgumentParser, names_by_reason: Mapping[str, Sequence[str]]) -> None:
    """Add hidden flags that end the command with their reason. Names have no dashes at the front."""
    for reason, names in names_by_reason.items():
        for name in names:
            parser.add_argument(f"--{name}", action=_Refuse, reason=reason)


class _Refuse(argparse.Action):
    """A flag that is known but cannot be used."""

    def __init__(self, option_strings: Sequence[str], dest: str, reason: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="*", help=argparse.SUPPRESS)
        self._reason = reason

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is not supported: {self._reason}")
