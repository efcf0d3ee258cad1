"""The documentation against the code: names, paths and links exist, tables marked *replayed* come out as printed.

Names are looked up in the source text, so nothing is imported for them. Not a check of the prose.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
import torch

from antiphon import errors
from antiphon.core.blocks import BlockPool
from antiphon.core.cache_dtype import CacheDtype
from antiphon.core.context import Context, Placement, Slide
from antiphon.core.duplex import DuplexConfig, DuplexTokens, UnitDecisions
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow, SlideMode, WindowPolicy
from antiphon.kernels.rotate_keys.op import rotate_keys
from antiphon.kernels.rotation import rotate, rotation
from antiphon.models.minicpmo.released import RELEASED
from antiphon.stages.paged import CacheConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "antiphon"
# reference.md is about another implementation; its names are not ours.
DOCUMENTS = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "reference.md")
LINKING = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]

WRITTEN = ("written", "tokens")
PLACED = ("slots", "positions", "keys at", "dropped")
HELD = ("ring blocks", "first slot", "shift", "context", "free blocks")
RING_COLUMNS = (*WRITTEN, *PLACED, *HELD)
CONTEXT_COLUMNS = (*WRITTEN, "words", *PLACED, "`previous`", "anchor slots", *HELD)


def text_of(document: str) -> str:
    return (ROOT / "docs" / document).read_text(encoding="utf-8")


def table(document: str, *headers: str) -> list[list[str]]:
    """Cells, without backticks, of the one table with these headers."""
    head = re.escape(f"| {' | '.join(headers)} |\n")
    found = re.findall(rf"^{head}\|[-|]+\|\n((?:\|.*\|\n)+)", text_of(document), re.MULTILINE)
    assert len(found) == 1, f"{document} has {len(found)} tables of {headers}"
    return [line.replace("`", "")[2:-2].split(" | ") for line in found[0].splitlines()]


def suffixes(parts: Sequence[str], separator: str) -> set[str]:
    """`a.b.c`, `b.c`, `c`."""
    return {separator.join(parts[start:]) for start in range(len(parts))}


@cache
def known_paths() -> set[str]:
    """Every file and folder of the project, by its whole path and by any end of it."""
    found = [
        path
        for top in ("src", "tests", "docs", "deploy", "examples")
        for path in (ROOT / top, *(ROOT / top).rglob("*"))
    ]
    return {end for path in found for end in suffixes(path.relative_to(ROOT).parts, "/")}


@cache
def known_names() -> set[str]:
    """Every part, module, class, function, field, constant, enum value and code, qualified or not."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names |= {end for length in range(1, len(parts) + 1) for end in suffixes(parts[:length], ".")}
        for qualified in members(ast.parse(path.read_text(encoding="utf-8")).body):
            names |= suffixes((*parts, *qualified), ".")
    return names


@cache
def known_addresses() -> set[str]:
    """Of the server: texts in the package that begin as one."""
    sources = (path.read_text(encoding="utf-8") for path in (PACKAGE / "server").rglob("*.py"))
    return {address for source in sources for address in re.findall(r'"(/[\w/.{}]+)"', source)}


def is_address(word: str) -> bool:
    """A path that ends in ID has any name there."""
    return re.sub(r"/ID$", "/{session_id}", word.partition("?")[0]) in known_addresses()


def members(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ...]]:
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                yield (name,)
                yield from ((name, *inner) for inner in members(node.body))
            case ast.FunctionDef(name=name):
                yield (name,)
                yield from ((attribute,) for attribute in re.findall(r"self\.(\w+)(?:: .+)? = ", ast.unparse(node)))
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                yield (name,)
                # The values of a Literal: names on the wire.
                yield from ((value,) for value in re.findall(r"'([\w.]+)'", ast.unparse(annotation)))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield (name,)
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield (value.value,)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_and_name_in_the_text_exists(document: str) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(document), flags=re.MULTILINE | re.DOTALL)
    unknown = []
    for span in re.findall(r"`([^`]+)`", prose):
        for word in span.split():
            if word.startswith("/"):
                unknown += [] if is_address(word) else [word]
            elif "/" in word or re.fullmatch(r"[\w.]+\.(py|md|json|yaml)", word):
                unknown += [word] if word.rstrip("/") not in known_paths() else []
            elif word == span and (name := re.match(r"[A-Za-z_][\w.]*(?=$|\()", word)):
                unknown += [word] if name[0] not in known_names() | known_paths() | {"null"} else []
    assert not unknown, f"{document} names what does not exist: {unknown}"


def test_every_test_that_a_module_names_exists() -> None:
    missing = [
        f"{path.relative_to(PACKAGE)} names {test}"
        for path in PACKAGE.rglob("*.py")
        for test in re.findall(r"tests/[\w/]+(?:\.py|\.md)?", path.read_text(encoding="utf-8"))
        if not (ROOT / test).exists()
    ]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_name_in_a_diagram_exists(document: str) -> None:
    unknown = []
    for diagram in re.findall(r"^```mermaid\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL):
        boxes = re.findall(r'\["(.+?)"|participant \w+ as (\S+)', diagram)
        words = [line for box in boxes for line in "".join(box).split("<br/>")]
        words += re.findall(
            r"\b[A-Z][a-z]\w*|\b(?:\w+\.)*\w+_\w+(?:\.\w+)*|\b\w+(?=\(\)|\([A-Z])",
            re.sub(r"\bNote\b|\bTrue\b|\bFalse\b", "", diagram),
        )
        unknown += [word for word in words if word not in known_names() | known_paths()]
    assert not unknown, f"{document} draws what does not exist: {unknown}"


@pytest.mark.parametrize("document", LINKING, ids=lambda document: document.name)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), f"{document.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


def test_the_map_has_a_line_for_every_module() -> None:
    listed = [path for path, _ in table("architecture.md", "path", "what it is")]
    assert all((PACKAGE / path).exists() for path in listed)
    modules = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    missing = [
        name
        for name in modules
        if not any(name == path or path[-1] == "/" and name.startswith(path) for path in listed)
    ]
    assert not missing, f"docs/architecture.md, Files, lacks {sorted(missing)}"


def test_the_table_of_errors_has_all_errors_with_their_codes() -> None:
    listed = [row[:3] for row in table("architecture.md", "error", "code", "retryable", "what ends")]
    defined = [
        error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, errors.AntiphonError)
    ]
    assert listed == [[error.__name__, error.code, "yes" if error.is_retryable else "no"] for error in defined]


def test_the_table_of_golden_kinds_has_all_kinds() -> None:
    kinds = [row[0] for row in table("architecture.md", "kind", "what is compared", "code under test")]
    assert sorted(kinds) == sorted(path.name for path in (ROOT / "tests" / "golden").iterdir())


def test_the_table_of_turns_is_what_decisions_do() -> None:
    tokens = DuplexTokens(unit_start=1, unit_end=2, listen=3, tts_bos=4, turn_eos=5, chunk_eos=6, chunk_tts_eos=7)
    ids = {"listen": 3, "tts_bos": 4, "turn_eos": 5, "chunk_eos": 6, "chunk_tts_eos": 7, "any other": 8, "the same": 8}
    rows = table("architecture.md", "turn", "sampled", "fed", "unit", "turn then")
    assert len(rows) == 10
    for before, sampled, fed, unit, after in rows:
        decisions = UnitDecisions(tokens, DuplexConfig(), is_turn_open=before == "open", is_forced_listen=False)
        assert decisions.take(ids[sampled]) == ids.get(fed), sampled
        assert decisions.is_done == (unit == "ends"), sampled
        assert decisions.is_turn_open == (after == "open"), sampled


def live(
    context: Context, window: WindowPolicy, written: str, num_tokens: int, words: tuple[int, ...]
) -> tuple[Placement, Slide | None]:
    """Write one row of a worked example: the prompt, the suffix, or a unit that is closed at once."""
    if written == "prompt":
        return context.append_prompt(num_tokens), None
    if written == "suffix":
        return context.append_suffix(tuple(range(-num_tokens, 0))), None
    placement = context.append(num_tokens)
    context.close_unit(int(written.removeprefix("u")), words)
    plan = window.plan(context.num_tokens, context.units, context.previous)
    return placement, None if plan is None else context.slide(plan)


def replayed(pool: BlockPool, window: WindowPolicy, columns: tuple[str, ...]) -> list[list[str]]:
    """What the worked example with these columns should print."""
    context = Context(pool, SlideMode.ROTATE_QUERY, max_tokens=100)
    printed = []
    for row in table("kv_cache.md", *columns):
        words = ints(row[2]) if "words" in columns else ()
        placed, slide = live(context, window, row[0], int(row[1]), words)
        context.check()
        pool.check([segment.blocks for segment in context.segments()])
        end = placed.first_position + len(placed.slots)
        ring = context.segments()[-1]
        cells = {
            "written": row[0],
            "tokens": row[1],
            "words": joined(words),
            "slots": ranges(placed.slots),
            "positions": ranges(range(placed.first_position, end)),
            "keys at": ranges(range(placed.first_position + placed.key_shift, end + placed.key_shift)),
            "dropped": joined([f"u{record.unit}" for record in slide.dropped] if slide else []),
            "`previous`": joined(context.previous),
            "anchor slots": ranges(slide.anchor.slots if slide else ()),
            "ring blocks": joined(ring.blocks),
            "first slot": str(ring.first_slot),
            "shift": str(context.shift),
            "context": str(context.num_tokens),
            "free blocks": str(pool.num_free_blocks),
        }
        printed.append([cells[column] for column in columns])
    return printed


def joined(values: Sequence[object]) -> str:
    return " ".join(map(str, values)) or "-"


def ints(cell: str) -> tuple[int, ...]:
    return () if cell == "-" else tuple(map(int, cell.split()))


def ranges(values: Sequence[int]) -> str:
    runs = [[value for _, value in run] for _, run in groupby(enumerate(values), lambda pair: pair[1] - pair[0])]
    return joined([f"{run[0]}-{run[-1]}" if len(run) > 1 else run[0] for run in runs])


def test_the_worked_example_of_the_ring_is_what_the_context_does() -> None:
    window = BasicWindow(high_tokens=17, low_tokens=15)
    assert f"`{window!r}`" in text_of("kv_cache.md")
    assert replayed(BlockPool(6, 4), window, RING_COLUMNS) == table("kv_cache.md", *RING_COLUMNS)


def test_the_worked_example_of_previous_is_what_the_context_does() -> None:
    window = ContextWindow(max_units=2, previous_max_tokens=3, marker=(1, 2))
    assert f"`{window!r}`" in text_of("kv_cache.md")
    assert replayed(BlockPool(8, 4), window, CONTEXT_COLUMNS) == table("kv_cache.md", *CONTEXT_COLUMNS)


def after_u2(mode: SlideMode) -> tuple[Context, Slide]:
    """The first worked example up to its first slide."""
    context = Context(BlockPool(6, 4), mode, max_tokens=100)
    slides = [
        live(context, BasicWindow(17, 15), row[0], int(row[1]), ())[1]
        for row in table("kv_cache.md", *RING_COLUMNS)[:4]
    ]
    assert slides[-1] is not None, "u2 makes the window slide"
    return context, slides[-1]


def test_the_table_of_slides_is_what_each_mode_does() -> None:
    rows = table("kv_cache.md", "mode", "rotated slots", "rotated by", "recomputed slots", "first slot", "shift")
    assert [row[0] for row in rows] == [mode.value for mode in SlideMode]
    for row in rows:
        context, slide = after_u2(SlideMode(row[0]))
        rotated, recomputed = ranges(slide.rotated.slots), ranges(slide.recomputed.slots)
        first_slot = context.segments()[-1].first_slot
        assert row[1:] == [rotated, str(slide.rotated_by), recomputed, str(first_slot), str(context.shift)]


def test_a_query_of_the_worked_example_is_as_far_from_each_key_as_their_positions() -> None:
    context, _ = after_u2(SlideMode.ROTATE_QUERY)
    query = context.append(1).first_position
    headers = ("key", "position", "stored at", "query rotated to", "difference of angles", "distance")
    for _, *numbers in table("kv_cache.md", *headers):
        position = int(numbers[0])
        shift = 0 if position < context.num_anchor_tokens else context.shift
        distance = query - position
        assert numbers == [str(n) for n in (position, position + shift, query + shift, distance, distance)]


def test_the_memory_of_a_session_is_what_its_window_needs() -> None:
    windows = (OffWindow(8192), BasicWindow(8000, 6000), ContextWindow(24, 500, (271, 19702, 25, 220)))
    rows = []
    for window in windows:
        num_tokens = window.peak_tokens(num_prompt_tokens=2048, max_unit_tokens=162)
        cache = CacheConfig.for_tokens(num_tokens, num_segments=3)
        sizes = [
            replace(cache, dtype=kept_in).make(RELEASED.thinker.decoder, torch.bfloat16, torch.device("meta")).num_bytes
            for kept_in in CacheDtype
        ]
        num_slots = cache.num_blocks * cache.block_size
        assert sizes == [num_slots * 147_456, num_slots * 76_032]
        rows.append([repr(window), str(num_tokens), str(cache.num_blocks), *(f"{size / 2**20:.0f}" for size in sizes)])
    assert rows == table("kv_cache.md", "window", "tokens", "blocks", "MiB", "MiB in float8")


def test_rotating_keys_in_place_loses_as_much_as_the_docs_say() -> None:
    head_dim, theta, step = 128, 1e6, 79
    keys = torch.randn(64, 2, head_dim, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(64) + 300 * step
    cache = rotate(keys, rotation(positions, head_dim, theta)).bfloat16()[None, None]
    num_slides = 0
    for wanted, printed in table("kv_cache.md", "slides", "relative error of the keys"):
        for _ in range(int(wanted) - num_slides):
            rotate_keys(cache, torch.arange(64), -step, theta)
        num_slides = int(wanted)
        exact = rotate(keys, rotation(positions - num_slides * step, head_dim, theta))
        error = ((cache[0, 0].float() - exact).norm() / exact.norm()).item()
        assert error == pytest.approx(float(printed.removesuffix(" %")) / 100, rel=0.05)
