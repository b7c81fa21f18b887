"""What the source tree keeps apart stays apart. The bounds only fall: lower them when the figures do."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.house.imports import cycles, import_graph, parse_file
from scripts.house.machine import library_uses, machine_places
from scripts.house.mentions import format_mentions, model_mentions
from scripts.house.request import spine_files, touched_files
from scripts.house.size import long_files, long_functions, wide_classes

MODULES_IN_CYCLES = 0

MACHINE_PLACES = {"shardline/cluster/ray/placing.py": 1, "shardline/engine/executor/threads.py": 1}
"""File -> lines that ask what they run on."""

LIBRARY_LINES = 5
"""Lines outside the back ends that use a machine's own library."""

FORMAT_FILES = {"int8": 3, "int4": 0, "fp8": 2}
"""Files besides its own that know a weight format; fp8 is also a name of a checkpoint's `quant_method`."""

GGUF_FOLDER = "shardline/checkpoints/gguf/"
"""GGUF has architectures of its own, and these files say which models they are."""

FILE_LINES, FUNCTION_LINES, CLASS_METHODS = 600, 60, 15
"""The most that a file, a function or a class may have."""

LONG_FUNCTIONS = {
    "models/step_work.py:step_work": 69,
    "kernels/cuda/triton/attention.py:_launch": 80,
    "kernels/cuda/triton/attention_kernel.py:attention_kernel": 154,
    "kernels/cuda/triton/qkv_linear.py:_qkv_kernel": 92,
    "kernels/cuda/triton/routing.py:_route_kernel": 79,
    "kernels/cuda/triton/sampling.py:_sample_kernel": 61,
}
"""Most of them are Triton kernels: a launch compiles one function, and its arguments alone are a screen."""

WIDE_CLASSES = {
    "kernels/cuda/weights.py:RowKernels": 21,
    "kernels/common.py:CommonKernels": 23,
}
"""They are tables of kernels, with one method for each operation that a back end offers."""


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Parsed once, and kept no longer than these tests need them."""
    yield
    parse_file.cache_clear()


def test_modules_in_cycles():
    found = cycles(import_graph())
    assert sum(map(len, found)) <= MODULES_IN_CYCLES, found


def test_places_where_the_machine_shows_are_the_listed_ones():
    places = machine_places()
    assert Counter(place.file for place in places) == MACHINE_PLACES, "\n".join(map(str, places))


def test_lines_that_use_a_machines_library():
    found = library_uses()
    assert len(found) <= LIBRARY_LINES, "\n".join(map(str, found))


def test_files_that_know_a_weight_format():
    found = format_mentions()
    for name, files in found.items():
        assert len(files) <= FORMAT_FILES[name], files


def test_a_model_is_known_to_its_own_file():
    found = model_mentions()
    assert len(found) >= 14
    outside = {name: [file for file in files if not file.startswith(GGUF_FOLDER)] for name, files in found.items()}
    assert not any(outside.values()), outside


def test_nothing_grows_beyond_what_one_can_read():
    assert long_files(FILE_LINES) == {}
    for found, bounds in (
        (long_functions(FUNCTION_LINES), LONG_FUNCTIONS),
        (wide_classes(CLASS_METHODS), WIDE_CLASSES),
    ):
        assert {name: count for name, count in found.items() if count > bounds.get(name, 0)} == {}


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """A source folder with these modules of a package `shardline`."""
    for name in {"": "", **files}:
        path = root / "shardline" / (name or "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(files.get(name, "")))
        for parent in path.relative_to(root).parents[:-1]:
            (root / parent / "__init__.py").touch()
    return root


def test_cycles_count_lazy_imports_but_not_those_of_type_checkers(tmp_path):
    source = write_tree(
        tmp_path,
        {
            "a.py": "from shardline import b",
            "b.py": "def load():\n    from .c import thing\n",
            "c.py": "import shardline.a",
            "d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shardline.e import x\n",
            "e.py": "from shardline.d import y",
        },
    )
    assert cycles(import_graph(source)) == [["shardline.a", "shardline.b", "shardline.c"]]


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("x.device.type == 'cpu'", "compare"),
        ("kind not in ('cuda', 'hip')", "compare"),
        ("str(x.device).startswith('cuda')", "compare"),
        ("{'cpu': 1, 'cuda': 2}[kind]", "compare"),
        ("from shardline import _cpu\nkernels(x) is not _cpu", "compare"),
        ("match kind:\n    case 'cuda': pass", "compare"),
        ("device.is_host", "ask"),
        ("x.is_cuda", "ask"),
        ("def f(on_gpu: bool): ...", "ask"),
        ("are_few_on_gpu(x)", "ask"),
        ("def f():\n    import triton", "kernels"),
        ("from shardline.runtime.machines.cuda.graphs import Graph", "kernels"),
        ("from shardline.runtime.machines import cuda", "kernels"),
    ],
)
def test_every_way_to_ask_for_the_machine_is_found(tmp_path, code, rule):
    files = {"runtime/layer.py": code, "runtime/machines/cuda/graphs.py": code, "deployment/probe.py": code}
    (place,) = machine_places(write_tree(tmp_path, files))
    assert (place.file, place.rules) == ("shardline/runtime/layer.py", (rule,))


@pytest.mark.parametrize(
    "code",
    [
        "from shardline.runtime.machines.base import Backend",
        "from shardline.runtime.machines import open_backend",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import triton",
        "config.cpu_threads == 4",
        "config.gpu_memory_utilization",
        "server.host == name",
        "'the cpu'",
    ],
)
def test_what_asks_nothing_is_no_place(tmp_path, code):
    files = {"runtime/layer.py": code, "runtime/machines/base.py": ""}
    assert machine_places(write_tree(tmp_path, files)) == []


@pytest.mark.parametrize(
    "code", ["from shardline import _cpu", "torch.cuda.synchronize()", "import sys\nsys.platform", "platform.machine()"]
)
def test_uses_of_a_machines_library_are_found(tmp_path, code):
    (place,) = library_uses(write_tree(tmp_path, {"runtime/layer.py": code}))
    assert place.file == "shardline/runtime/layer.py"


def test_formats_are_found_in_names_and_strings_but_not_as_other_things(tmp_path):
    source = write_tree(
        tmp_path,
        {
            "a.py": "from shardline.b import linear_int8",
            "b.py": "class Int4Linear: ...\nif scheme == 'fp8_128': ...",
            "c.py": "'use int8 or fp8'\nx = torch.int8\ny = torch.uint8\nuint8 = 1\nkv_dtype = 'fp8'",
            "weights/formats/int8.py": "name = 'int8'",
            "kernels/host/pack.py": "def pack_int8(): ...",
        },
    )
    found = format_mentions(source)
    assert found == {"int8": ["shardline/a.py"], "int4": ["shardline/b.py"], "fp8": ["shardline/b.py"]}


def test_sizes_count_nested_functions_and_own_methods(tmp_path):
    method = "    def {}(self):\n        return 1\n"
    nested = "def outer():\n    def inner():\n        return 1\n    return inner\n"
    source = write_tree(tmp_path, {"a.py": "class A:\n" + method.format("f") + method.format("g"), "b.py": nested})
    assert long_files(4, source) == {"a.py": 5}
    assert long_functions(1, source) == {"a.py:f": 2, "a.py:g": 2, "b.py:outer": 4, "b.py:inner": 2}
    assert (wide_classes(1, source), wide_classes(2, source)) == ({"a.py:A": 2}, {})


def test_the_spine_has_the_files_of_which_many_functions_run():
    front = {"a.py:f": 9, "a.py:g": 1, "b.py:f": 40}
    engine = {"a.py:h": 1, "a.py:f": 1, "a.py:i": 2, "c.py:f": 1}
    assert touched_files([front, engine]) == ["a.py", "b.py", "c.py"]
    assert spine_files([front, engine]) == ["a.py"]
