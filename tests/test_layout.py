"""What the layout and the style demand of `src` and only a program can see. What a linter knows is in pyproject.toml.

A rule is a function from a source file to what is wrong there. RULES holds examples that each of them must find.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from antiphon import errors

SRC = Path(__file__).parents[1] / "src"

STAGES_AND_BELOW = ("core", "errors", "kernels", "models", "stages", "units")
LAYOUT: dict[str, tuple[str, ...]] = {
    "": (),
    "errors": (),
    "units": (),
    "garbage": (),
    "core": ("errors", "units"),
    "kernels": ("errors",),
    "models": ("core.chat", "core.duplex", "errors", "kernels", "units"),
    "stages": ("core", "errors", "kernels", "models", "units"),
    "config": (
        *("core", "errors"),
        "models.minicpmo.flow_compute",
        "models.minicpmo.flow_membership",
        "models.minicpmo.prompt",
    ),
    "runner": ("config", "errors", "garbage"),
    "inspection": ("config", "runner.device", *STAGES_AND_BELOW),
    "happenings": STAGES_AND_BELOW,
    "counts": STAGES_AND_BELOW,
    "call": ("config", "happenings", *STAGES_AND_BELOW),
    "chat": ("call", "config", "happenings", *STAGES_AND_BELOW),
    "progress": (),
    "assembly": ("config", "progress", "runner", *STAGES_AND_BELOW),
    "engine": ("assembly", "call", "chat", "config", "counts", "happenings", "runner", *STAGES_AND_BELOW),
    "changing": ("call", "config", "engine", "happenings", *STAGES_AND_BELOW),
    "live": ("changing", "config", "counts", "engine", "garbage", "happenings", *STAGES_AND_BELOW),
    "aio": ("config", "counts", "happenings", "live", *STAGES_AND_BELOW),
    "recording": ("errors", "units"),
    "timeline": ("core", "units"),
    "voices": ("recording", *STAGES_AND_BELOW),
    "offline": ("config", "engine", "recording", *STAGES_AND_BELOW),
    "loading": ("config", "engine", "live", "voices", *STAGES_AND_BELOW),
    "server": (
        *("aio", "config", "core", "counts", "errors", "garbage", "happenings", "loading", "units", "voices"),
        "models.minicpmo.flow_compute",
        "models.minicpmo.flow_membership",
        "models.minicpmo.prompt",
    ),
    "console": ("errors",),
    "bench": (
        *("config", "console", "engine", "happenings", "live", "runner.device"),
        *("server.for_engine", "server.settings"),
        *STAGES_AND_BELOW,
    ),
    "__main__": (
        "bench",
        "config",
        "console",
        "engine",
        "inspection",
        "offline",
        "recording",
        "runner.device",
        "server",
        "timeline",
        "voices",
        *STAGES_AND_BELOW,
    ),
}
"""What each part may import besides itself."""

PURE_PARTS = ("core", "errors", "units")
CACHE_PARTS = ("core", "engine", "kernels", "models", "stages")
"""Where a page would mean a block. A web page and the system's memory pages may be called so."""

MUTABLE_IN_CORE = {
    "Segment": "a run of tokens that grows and slides; only its Context writes it",
    "UnitRecords": "units that are closed and dropped; only the Context that holds them writes them",
}
NAMED_QUANTITIES = {"block_size": "the word for a block's slots", "cfg_rate": "the official name of a strength"}
BARE_QUANTITIES = re.compile(
    "age|budget|deadline|delay|duration|elapsed|interval|latency|length|memory|period|rate|size|time|timeout"
)
MAX_DOCSTRING_LINES = 8


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the package. name: dotted, without `antiphon`; `__init__.py` has its folder's name."""

    path: Path
    name: str
    tree: ast.Module

    @property
    def part(self) -> str:
        return self.name.partition(".")[0]

    def imports(self) -> Found:
        """Dotted names together with what is taken from them, wherever in the file they are imported."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)

    def dataclasses(self) -> Iterator[tuple[ast.ClassDef, set[str]]]:
        """Each with the options that are switched on."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                for decorator in node.decorator_list:
                    if match := re.fullmatch(r"dataclass(\(.*\))?", ast.unparse(decorator)):
                        yield node, set(re.findall(r"(\w+)=True", match[0]))


Found = Iterator[tuple[int, str]]
Rule = Callable[[Source], Found]


def read(path: Path, text: str) -> Source:
    """path: below `src`."""
    parts = [part for part in path.with_suffix("").parts[1:] if part != "__init__"]
    return Source(path, ".".join(parts), ast.parse(text))


@cache
def sources() -> tuple[Source, ...]:
    return tuple(read(path.relative_to(SRC), path.read_text(encoding="utf-8")) for path in sorted(SRC.rglob("*.py")))


def imports_across_the_layout(code: Source) -> Found:
    if code.part not in LAYOUT:
        yield 1, f"{code.part} is a new part; give it a line in LAYOUT"
    allowed = (code.part, *LAYOUT.get(code.part, ()))
    for line, name in code.imports():
        top, _, inner = name.partition(".")
        if not top or (top == "antiphon" and not any(f"{inner}.".startswith(f"{part}.") for part in allowed)):
            yield line, f"{code.part} may not import {name}"


def libraries_out_of_place(code: Source) -> Found:
    for line, name in code.imports():
        top = name.partition(".")[0]
        if code.part in PURE_PARTS and top not in ("antiphon", *sys.stdlib_module_names):
            yield line, f"{code.part} is pure Python and may not import {name}"
        if (top == "asyncio" and code.part not in ("aio", "server")) or (top == "torch" and code.part == "server"):
            yield line, f"{code.part} may not import {name}"


def imports_around_op(code: Source) -> Found:
    for line, name in code.imports():
        match name.split("."):
            case ["antiphon", "kernels", operator, "kernel", *_] if code.name != f"kernels.{operator}.op":
                yield line, f"only kernels/{operator}/op.py imports its kernel.py"
            case ["antiphon", "kernels", operator, "reference", *_] if code.part != "kernels":
                yield line, f"outside kernels, {operator} is reached through its op.py"


def missing_or_long_docstrings(code: Source) -> Found:
    docstring = ast.get_docstring(code.tree)
    if docstring is None and code.tree.body:
        yield 1, "no module docstring"
    # Pictures, formulas and tables may be as long as they need.
    num_lines = len(re.findall(r"^(?![ |├│└]).+", docstring or "", re.MULTILINE))
    if num_lines > MAX_DOCSTRING_LINES:
        yield 1, f"a module docstring of {num_lines} lines; at most {MAX_DOCSTRING_LINES}"


def guessed_attributes_and_keys(code: Source) -> Found:
    is_reader = code.name.endswith(("config", "checkpoint", "server.protocol"))
    for node in ast.walk(code.tree):
        match node:
            case ast.Call(func=ast.Name(id="hasattr")) | ast.Call(func=ast.Name(id="getattr"), args=[_, _, _]):
                yield node.lineno, "hasattr, or getattr with a default"
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str()), *_]) if not is_reader:
                yield node.lineno, ".get of a literal key; make it a field of a dataclass"


def wall_clocks(code: Source) -> Found:
    yield from (found for found in code.imports() if found[1] == "time.time")
    for node in ast.walk(code.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr="time"):
                yield node.lineno, "time.time; take a Clock"


def pages(code: Source) -> Found:
    for node in ast.walk(code.tree) if code.part in CACHE_PARTS else ():
        if isinstance(node, ast.expr | ast.stmt | ast.arg | ast.keyword | ast.alias):
            names = (value for key, value in ast.iter_fields(node) if key in ("id", "attr", "arg", "name", "asname"))
            for name in names:
                if re.search(r"(?<![A-Za-z])(pages?|PAGES?)(?![A-Za-z])|Pages?(?![a-z])", str(name)):
                    yield node.lineno, f"{name}: the word is block"


def silent_asserts(code: Source) -> Found:
    for node in ast.walk(code.tree):
        if isinstance(node, ast.Assert) and node.msg is None:
            yield node.lineno, "an assert without a message"


def work_at_import(code: Source) -> Found:
    for statement in code.tree.body:
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                pass
            case ast.Expr() | ast.If() | ast.For() | ast.While() | ast.With() | ast.Try() | ast.Assert() | ast.Delete():
                yield statement.lineno, "a module only defines; work is in functions"
    yield from ((node.lineno, "global state") for node in ast.walk(code.tree) if isinstance(node, ast.Global))


def quantities_without_unit(code: Source) -> Found:
    for node, _ in code.dataclasses():
        for field in node.body:
            match field:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="int" | "float")):
                    word = name.rpartition("_")[2]
                    # Dimensions of tensors keep the names that the checkpoint's own configuration gives them.
                    is_known = name in NAMED_QUANTITIES or (word == "size" and code.part == "models")
                    if BARE_QUANTITIES.fullmatch(word) and not is_known:
                        yield field.lineno, f"{node.name}.{name} does not say its unit"


def mutable_data_in_core(code: Source) -> Found:
    for node, options in code.dataclasses() if code.part == "core" else ():
        wanted = {"slots"} if node.name in MUTABLE_IN_CORE else {"slots", "frozen"}
        if options & {"slots", "frozen"} != wanted:
            yield node.lineno, f"{node.name} should be {' and '.join(sorted(wanted))}, by MUTABLE_IN_CORE"


RULES: dict[Rule, tuple[tuple[str, str], ...]] = {
    imports_across_the_layout: (
        ("core/x", "def f():\n    from antiphon.kernels import rotation"),
        ("models/x", "from antiphon.core.window import BasicWindow"),
        ("engine", "import antiphon.server.app"),
        ("core/x", "from . import blocks"),
        ("misc/x", ""),
    ),
    libraries_out_of_place: (
        ("core/x", "import torch.nn"),
        ("core/x", "import asyncio"),
        ("stages/x", "from asyncio import Queue"),
        ("server/x", "from torch import Tensor"),
    ),
    imports_around_op: (
        ("kernels/attention/reference", "from antiphon.kernels.attention.kernel import launch"),
        ("kernels/rms_norm/op", "from antiphon.kernels.attention import kernel"),
        ("models/x", "from antiphon.kernels.attention import reference"),
    ),
    missing_or_long_docstrings: (("core/x", "x = 1"), ("core/x", repr("A line.\n" * (MAX_DOCSTRING_LINES + 1)))),
    guessed_attributes_and_keys: (
        ("core/x", "hasattr(x, 'y')"),
        ("core/x", "getattr(x, 'y', None)"),
        ("core/x", "x.get('y')"),
    ),
    wall_clocks: (("core/x", "now = time.time()"), ("core/x", "from time import time")),
    pages: (("core/x", "def free(num_pages): ..."), ("core/x", "class KVPageTable: ..."), ("core/x", "PAGE = 1")),
    silent_asserts: (("core/x", "assert x"),),
    work_at_import: (("core/x", "print(1)"), ("core/x", "def f():\n    global x")),
    quantities_without_unit: (
        ("core/x", "@dataclass\nclass X:\n    step_delay: float"),
        ("stages/x", "@dataclass\nclass X:\n    chunk_size: int"),
    ),
    mutable_data_in_core: (
        ("core/x", "@dataclass(slots=True)\nclass X: ..."),
        ("core/x", "@dataclass\nclass Segment: ..."),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_src_has_no(rule: Rule) -> None:
    found = [f"{code.path}:{line}: {what}" for code in sources() for line, what in rule(code)]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("rule", "name", "text"), [(rule, *bad) for rule, examples in RULES.items() for bad in examples]
)
def test_a_rule_finds_what_it_forbids(rule: Rule, name: str, text: str) -> None:
    assert list(rule(read(Path("antiphon", f"{name}.py"), text))), f"nothing found in {name}: {text}"


def test_exceptions_to_the_rules_are_still_needed() -> None:
    found = [(code, node) for code in sources() for node, _ in code.dataclasses()]
    assert {node.name for code, node in found if code.part == "core"} >= set(MUTABLE_IN_CORE)
    fields = {ast.unparse(field.target) for _, node in found for field in node.body if isinstance(field, ast.AnnAssign)}
    assert fields >= set(NAMED_QUANTITIES)


def test_the_drawing_of_the_errors_is_their_tree() -> None:
    drawing = re.findall(r"^([├│└─ ]*)([A-Z]\w+)", (errors.__doc__ or "").partition("\n\n")[2], re.MULTILINE)
    assert [(len(indent) // 4, name) for indent, name in drawing] == [
        (depth, error.__name__) for depth, error in error_tree(errors.AntiphonError, 0)
    ]


def test_every_error_has_a_wire_code_of_its_own() -> None:
    codes = [vars(error).get("code", "") for _, error in error_tree(errors.AntiphonError, 0)]
    assert len(set(codes)) == len(codes), codes
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes), codes


def error_tree(error: type[errors.AntiphonError], depth: int) -> Iterator[tuple[int, type[errors.AntiphonError]]]:
    """In order of definition."""
    yield depth, error
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from error_tree(child, depth + 1)
