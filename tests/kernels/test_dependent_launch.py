"""That kernels wait for what was launched before, wherever they may be on the device before it has ended."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import antiphon.kernels

FILES = sorted(Path(antiphon.kernels.__path__[0]).glob("*/kernel.py"))


def names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_whatever_is_launched_early_waits_before_it_does_anything(file: Path) -> None:
    functions = [one for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.FunctionDef)]
    early = {one.name: one for one in functions if "IS_DEPENDENT" in [argument.arg for argument in one.args.args]}
    for function in early.values():
        first, *_ = function.body[1:] if ast.get_docstring(function) else function.body
        assert ast.unparse(first) == "await_previous(IS_DEPENDENT)", function.name
    launches = [
        call
        for function in functions
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
    ]
    for call in launches:
        is_told = any("dependent" in names(keyword.value) for keyword in call.keywords if keyword.arg is None)
        assert is_told == bool(names(call.func) & early.keys()), ast.unparse(call.func)
    assert launches
