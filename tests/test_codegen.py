"""Masks and score modifiers as Triton source: bounds, printing, the cache. What the source computes is tested in
``test_kernels_decode.py``, whose interpreted process also runs :func:`check_in_interpreter`."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sals_compile.kernels import codegen
from sals_compile.kernels.index_expr import (
    KV,
    SCORE,
    B,
    Expr,
    H,
    Modifier,
    Q,
    const,
    evaluate,
    integer,
    load,
    make,
)

PAST = make("add", Q, load(0))
CAUSAL = make("le", KV, PAST)

BOUNDS = {
    "causal": (CAUSAL, "(q + a0) + 1", None),
    "strict": (make("lt", KV, PAST), "q + a0", None),
    "mirrored": (make("ge", PAST, KV), "(q + a0) + 1", None),
    "moved": (make("ge", make("sub", PAST, KV), const(0)), "(q + a0) + 1", None),
    "negated": (make("not", make("gt", KV, PAST)), "(q + a0) + 1", None),
    "window": (make("and", CAUSAL, make("gt", KV, make("sub", Q, const(9)))), "(q + a0) + 1", "(q - 9) + 1"),
    "either": (make("or", CAUSAL, make("lt", KV, const(4))), "max((q + a0) + 1, 4)", None),
    "unbounded side": (make("or", CAUSAL, make("eq", H, const(1))), None, None),
    "chunks": (make("eq", make("floordiv", KV, const(16)), load(0)), "(a0 + 1) * 16", "a0 * 16"),
    "de morgan": (make("not", make("or", make("gt", KV, PAST), make("eq", H, const(0)))), "(q + a0) + 1", None),
    "per head": (make("le", KV, make("add", Q, H)), None, None),
    "nothing": (const(False), "0", "2147483647"),
    "everything": (const(True), None, None),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_are_derived_from_the_conjuncts(name: str) -> None:
    mask, upper, lower = BOUNDS[name]
    found = codegen.upper_bound(mask), codegen.lower_bound(mask)
    assert tuple(None if f is None else str(f) for f in found) == (upper, lower)


_leaves = st.sampled_from([Q, KV, B, H, const(0), const(1), const(3), const(7), load(0), integer(0)])
_numbers = st.recursive(
    _leaves,
    lambda inner: (
        st.builds(make, st.sampled_from(["add", "sub", "mul", "min", "max"]), inner, inner)
        | st.builds(lambda x, c: make("floordiv", x, const(c)), inner, st.sampled_from([1, 4, 5]))
    ),
    max_leaves=4,
)
_masks = st.recursive(
    st.builds(make, st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), _numbers, _numbers),
    lambda inner: (
        st.builds(make, st.sampled_from(["and", "or"]), inner, inner) | st.builds(lambda x: make("not", x), inner)
    ),
    max_leaves=4,
)


@given(_masks, st.integers(0, 9), st.integers(0, 9))
def test_bounds_hold(mask: Expr, position: int, size: int) -> None:
    tensors, integers = [torch.tensor(position)], [size]
    indices = {
        "b": torch.arange(2).view(-1, 1, 1, 1),
        "h": torch.arange(3).view(1, -1, 1, 1),
        "q": torch.arange(4).view(1, 1, -1, 1),
        "kv": torch.arange(40).view(1, 1, 1, -1),
    }
    allowed = evaluate(mask, indices, tensors, integers).expand(2, 3, 4, 40)
    for bound, outside in ((codegen.upper_bound(mask), torch.ge), (codegen.lower_bound(mask), torch.lt)):
        if bound is not None:
            limit = evaluate(bound, indices, tensors, integers)
            assert not (allowed & outside(indices["kv"], limit)).any(), (str(mask), str(bound))


def test_source_is_readable_python() -> None:
    modifier = Modifier(CAUSAL, make("mul", const(30.0), make("tanh", make("div", SCORE, const(30.0)))))
    text = codegen.source(modifier.serialized, [torch.tensor(3)])
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert names[-4:] == ["mask_fn", "score_fn", "upper_fn", "lower_fn"]
    assert "kv <= (q + a0)" in text and "tl.load(args[0])" in text


def test_integer_division_rounds_down_and_kinds_are_respected() -> None:
    text = codegen.source(
        Modifier(make("eq", make("mod", KV, const(4)), load(0, Q))).serialized, [torch.zeros(9).bool()]
    )
    assert "_floordiv(" in text and "!= 0" in text
    text = codegen.source(
        Modifier(score=make("add", SCORE, load(0, H))).serialized, [torch.zeros(4, dtype=torch.bfloat16)]
    )
    assert ".to(tl.float32)" in text


def test_a_float_bound_is_not_a_bound() -> None:
    mask = make("le", KV, load(0))
    assert "Not bounded" in codegen.source(Modifier(mask).serialized, [torch.tensor(3.5)]).split("def upper_fn")[1]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="loads argument 1, but 1 tensors"):
        codegen.source(Modifier(make("le", KV, load(1))).serialized, [torch.tensor(1)])
    with pytest.raises(ValueError, match="needs 2 indices, has 1"):
        codegen.source(Modifier(load(0, KV)).serialized, [torch.zeros(2, 3).bool()])


def test_arguments_are_flat_and_never_short() -> None:
    tensor = torch.zeros(2, 3)
    assert codegen.arguments([tensor], [7]) == (tensor, 3, 1, 7)
    assert codegen.arguments([], []) == (0, 0)


def test_the_cache_is_content_addressed_and_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = codegen.write("x = 1\n")
    assert path.parent == tmp_path / "sals-compile" / "kernels"
    assert codegen.write("x = 1\n") == path and codegen.write("x = 2\n") != path
    path.write_text("raise SystemExit('not what was generated')")
    assert codegen.write("x = 1\n").read_text() == "x = 1\n"
    assert not list(path.parent.glob("*.tmp"))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_cache_is_worked_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tmp_path.chmod(0o500)
    assert codegen.write("x = 3\n").read_text() == "x = 3\n"


def test_the_same_modifier_is_generated_once() -> None:
    pytest.importorskip("triton")
    first = codegen.generate(Modifier(CAUSAL).serialized, [torch.tensor(1)])
    assert codegen.generate(Modifier(CAUSAL).serialized, [torch.tensor(2)]) is first
    assert first.masks and first.bounded and not first.modifies
