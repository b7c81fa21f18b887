"""What the source tree keeps apart stays apart. The bounds here, in house.toml and in docs/architecture.md
only fall: lower them when the figures do."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.house.imports import cycles, import_graph, parse_file
from scripts.house.machine import library_uses, machine_places
from scripts.house.mentions import format_mentions, model_mentions
from scripts.house.reach import Capability, capabilities, mentioning_files
from scripts.house.request import num_lines, spine_files, touched_files
from scripts.house.size import long_files, short_files, tree_size, wide_classes
from scripts.measure_house import SHORT_FILE, measure_chat, parse_bounds

MACHINE_PLACES = {"shardline/cluster/ray/placing.py": 1, "shardline/engine/executor/threads.py": 1}
"""File -> lines that ask what they run on."""

LIBRARY_LINES = 5
"""Lines outside the back ends that use a machine's own library."""

FORMAT_FILES = {"int8": 3, "int4": 1, "fp8": 2, "int8_w8a16": 1, "int8_fast": 4, "int4_fast": 1}
"""Files besides its own that know a weight format. fp8 is also a name of a checkpoint's `quant_method`, and int8 and
int4 are names of kernels."""

NAMED_BY_OTHERS = ("shardline/checkpoints/gguf/", "shardline/text/reasoning_parsers/", "shardline/text/tool_parsers/")
"""GGUF has architectures of its own, and these files say which models they are. vLLM's users name formats of answers
after models."""

FIGURES = parse_bounds((Path(__file__).parent / "house.toml").read_text())


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Parsed once, and kept no longer than these tests need them."""
    yield
    parse_file.cache_clear()


@pytest.mark.slow
def test_modules_in_cycles():
    assert cycles(import_graph()) == []
    with_types = cycles(import_graph(with_types=True))
    assert sum(map(len, with_types)) <= FIGURES["modules_in_cycles"], with_types


def test_size_of_the_tree():
    files, lines = tree_size()
    assert (files <= FIGURES["src_files"], lines <= FIGURES["src_lines"]) == (True, True), (files, lines)
    assert len(short_files(SHORT_FILE)) <= FIGURES["short_files"]


@pytest.mark.e2e
def test_files_on_the_way_of_a_streamed_chat():
    """Timers of the server run during some chats, on a busy machine during most: files that three chats share count."""
    shared: dict[str, set[str]] = {}
    over: list[object] = []
    for _ in range(3):
        for way, figures in measure_chat().items():
            shared[way] = shared.get(way, set(figures["list"])).intersection(figures["list"])
        sizes = {way: (len(files), sum(map(num_lines, files))) for way, files in shared.items()}
        over = [
            (way, size, sorted(shared[way]))
            for way, size in sizes.items()
            if size[0] > FIGURES[f"{way}_files"] or size[1] > FIGURES[f"{way}_lines"]
        ]
        if not over:
            return
    assert over == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", capabilities(), ids=lambda capability: capability.name)
def test_reach_of_a_capability(capability):
    found = mentioning_files(capability)
    assert len(found) <= capability.most_files, found


@pytest.mark.slow
def test_places_where_the_machine_shows_are_the_listed_ones():
    places = machine_places()
    assert Counter(place.file for place in places) == MACHINE_PLACES, "\n".join(map(str, places))


@pytest.mark.slow
def test_lines_that_use_a_machines_library():
    found = library_uses()
    assert len(found) <= LIBRARY_LINES, "\n".join(map(str, found))


@pytest.mark.slow
def test_files_that_know_a_weight_format():
    found = format_mentions()
    for name, files in found.items():
        assert len(files) <= FORMAT_FILES[name], files


@pytest.mark.slow
def test_a_model_is_known_to_its_own_file():
    found = model_mentions()
    assert len(found) >= 14
    outside = {name: [file for file in files if not file.startswith(NAMED_BY_OTHERS)] for name, files in found.items()}
    assert not any(outside.values()), outside


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """A source folder with these modules of a package `shardline`."""
    for name in {"": "", **files}:
        path = root / "shardline" / (name or "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(files.get(name, "")))
        for parent in path.relative_to(root).parents[:-1]:
            (root / parent / "__init__.py").touch()
    return root


def test_cycles_count_lazy_imports_and_those_of_type_checkers_if_asked(tmp_path):
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
    assert ["shardline.d", "shardline.e"] in cycles(import_graph(source, with_types=True))


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
            "d.py": "open('int8_w8a16')",
            "kernels/host/pack.py": "def pack_int8(): ...",
        },
    )
    found = {name: files for name, files in format_mentions(source).items() if files}
    a, b, d = ["shardline/a.py"], ["shardline/b.py"], ["shardline/d.py"]
    assert found == {"int8": a, "int4": b, "fp8": b, "int8_w8a16": d}


def test_sizes_count_lines_and_own_methods(tmp_path):
    method = "    def {}(self):\n        return 1\n"
    source = write_tree(tmp_path, {"a.py": "class A:\n" + method.format("f") + method.format("g"), "b.py": "x = 1\n"})
    assert tree_size(source) == (3, 6)
    assert (long_files(4, source), short_files(2, source)) == ({"a.py": 5}, ["b.py"])
    assert (wide_classes(1, source), wide_classes(2, source)) == ({"a.py:A": 2}, {})


def test_reach_counts_names_and_strings_but_not_prose_nor_own_files(tmp_path):
    table = "| a | b | c | d |\n|---|---|---|---|\n| drafts | `own/` | `draft` | 8 |\n"
    document = tmp_path / "page.md"
    document.write_text(f"# Page\n\n## Reach of a capability\n\n{table}\n## Next\n\n| a |\n|---|\n| b |\n")
    (capability,) = capabilities(document)
    assert capability == Capability("drafts", ("own/",), ("draft",), 8)
    source = write_tree(
        tmp_path,
        {
            "own/a.py": "draft = 1",
            "b.py": "def num_drafts(): ...",
            "c.py": "x = {'draft_tokens': 1}",
            "d.py": "'a draft of a page'",
            "e.py": "from shardline.own import draft",
        },
    )
    assert mentioning_files(capability, source) == ["b.py", "c.py", "e.py"]


def test_figures_are_names_and_numbers():
    assert parse_bounds("# of src\na_b = 12  # files\n\nc = 3\n") == {"a_b": 12, "c": 3}


def test_the_spine_has_the_files_of_which_many_functions_run():
    front = {"a.py:f": 9, "a.py:g": 1, "b.py:f": 40}
    engine = {"a.py:h": 1, "a.py:f": 1, "a.py:i": 2, "c.py:f": 1}
    assert touched_files([front, engine]) == ["a.py", "b.py", "c.py"]
    assert spine_files([front, engine]) == ["a.py"]
