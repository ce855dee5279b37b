"""One list of memos, one function that clears them."""

import ast
from pathlib import Path

import torch

import openrnn
from openrnn import memo

ROOT = Path(openrnn.__file__).parent


def test_remembers_and_forgets():
    asked = []

    @memo.memo(2)
    def twice(value):
        asked.append(value)
        return 2 * value

    try:
        assert [twice(1), twice(1), twice(2), twice(3), twice(1)] == [2, 2, 4, 6, 2]
        assert asked == [1, 2, 3, 1]
        memo.clear()
        assert twice(1) == 2
        assert asked == [1, 2, 3, 1, 1]
    finally:
        del memo.MEMOS[f"{__name__}.test_remembers_and_forgets.<locals>.twice"]


def test_a_layer_gives_the_same_after_everything_is_forgotten():
    layer, x = openrnn.LSTM(3, 4), torch.randn(5, 2, 3)
    before = torch.autograd.grad(layer(x)[0].sum(), [*layer.parameters()])
    assert any(kept.cache_info().currsize for kept in memo.MEMOS.values())
    memo.clear()
    assert not any(kept.cache_info().currsize for kept in memo.MEMOS.values())
    after = torch.autograd.grad(layer(x)[0].sum(), [*layer.parameters()])
    assert all(map(torch.equal, before, after))


def caches(source):
    """The functions of a module that functools remembers, but for those without arguments."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.args.args:
            words = [ast.unparse(decorator) for decorator in node.decorator_list]
            found += [
                node.name for word in words if word == "cache" or word.startswith("lru_cache")
            ]
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Call) and ast.unparse(called).startswith("lru_cache("):
                found.append(ast.unparse(node))
    return found


def test_every_memo_is_in_the_list():
    assert caches("@lru_cache(maxsize=3)\ndef f(x): ...\n@cache\ndef g(): ...") == ["f"]
    for path in ROOT.rglob("*.py"):
        if path.name != "memo.py":
            assert not caches(path.read_text(encoding="utf-8")), path
