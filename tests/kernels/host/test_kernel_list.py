"""csrc/cpu/kernels.toml says what the extension module offers, and everything generated from it is up to date."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardline import _cpu

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).resolve().parents[3]
KERNELS = tomllib.loads((ROOT / "csrc/cpu/kernels.toml").read_text(encoding="utf-8"))
FUNCTIONS = {entry["name"]: entry for entry in KERNELS["function"]}
CLASSES = {entry["name"]: entry for entry in KERNELS["class"]}

SCALARS = {"int", "float", "bool", "str"}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_kernel_stubs", ROOT / "scripts/generate_kernel_stubs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(signature: str) -> ast.FunctionDef:
    [function] = ast.parse(signature).body
    assert isinstance(function, ast.FunctionDef)
    return function


def bound_signature(function: Any) -> ast.FunctionDef:
    """The signature that nanobind wrote when the module was built; it writes a default as `\\0`, `\\1` and so on."""
    [(text, *_)] = function.__nb_signature__
    return parse(re.sub(r"\\\d+", "...", text) + ": ...")


def describe(arguments: ast.arguments) -> tuple[list[tuple[str, str, bool]], str | None]:
    """(name, type, whether it has a default) of each argument, and the name that takes the rest. Types other than
    scalars have no name in the bindings, only whether None is one of their values."""
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    described = []
    for place, argument in enumerate(plain):
        union = [] if argument.annotation is None else ast.unparse(argument.annotation).split(" | ")
        kept = sorted(name if name in SCALARS | {"None"} else "object" for name in set(union) or {"object"})
        described.append((argument.arg, " | ".join(dict.fromkeys(kept)), place >= first_default))
    return described, arguments.vararg.arg if arguments.vararg else None


def test_generated_files_are_up_to_date(generator: ModuleType) -> None:
    for path, text in generator.generate_files().items():
        assert path.read_text(encoding="utf-8") == text, f"run scripts/generate_kernel_stubs.py: {path} is out of date"


def test_the_list_names_everything_that_the_module_offers() -> None:
    offered = {name for name in vars(_cpu) if not name.startswith("_")}
    assert offered == set(FUNCTIONS) | set(CLASSES)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_those_of_the_binding(name: str) -> None:
    listed = parse(f"def {name}({FUNCTIONS[name]['parameters']}): ...".replace("\n", " "))
    bound = bound_signature(getattr(_cpu, name))
    assert describe(listed.args) == describe(bound.args)
    returns = FUNCTIONS[name].get("returns", "None")
    assert bound.returns is not None
    if returns in SCALARS | {"None", "list[str]", "tuple[int, int, int, int]"}:
        assert ast.unparse(bound.returns) == returns


@pytest.mark.parametrize("name", CLASSES)
def test_methods_are_those_of_the_binding(name: str) -> None:
    body = ast.parse(CLASSES[name]["body"]).body
    methods = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    bound = getattr(_cpu, name)
    offered = {member for member in vars(bound) if not member.startswith("_")}
    assert offered == {member for member in methods if not member.startswith("_")}
    for member, node in methods.items():
        function = getattr(bound, member)
        if isinstance(function, property):
            assert [ast.unparse(decorator) for decorator in node.decorator_list] == ["property"]
            continue
        listed, signature = describe(node.args), describe(bound_signature(function).args)
        assert [entry[::2] for entry in listed[0]] == [entry[::2] for entry in signature[0]], member


def test_every_member_of_the_protocol_says_what_it_computes() -> None:
    members = [entry for entry in FUNCTIONS.values() if entry.get("protocol", False)]
    assert members
    for entry in members:
        assert entry["doc"].endswith("."), entry["name"]


def test_the_generator_reports_what_is_out_of_date(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "stub.pyi"
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    monkeypatch.setattr(generator, "generate_files", lambda: {target: "text\n"})
    monkeypatch.setattr(sys, "argv", ["generate_kernel_stubs.py", "--check"])
    assert generator.main() == 1
    assert "out of date: stub.pyi" in capsys.readouterr().out
    assert not target.exists()
    monkeypatch.setattr(sys, "argv", ["generate_kernel_stubs.py"])
    assert generator.main() == 0
    assert target.read_text() == "text\n"
    monkeypatch.setattr(sys, "argv", ["generate_kernel_stubs.py", "--check"])
    assert generator.main() == 0
