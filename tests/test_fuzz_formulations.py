"""Fuzzed formulations of attention are found, recorded as meant and equal to the dense graph; near misses are declined
and stay right."""

from __future__ import annotations

import dataclasses
import functools

import formulations as grammar
import pytest
import torch
from formulations import NEAR_MISSES, Outcome, Spec, record_problems, run_near_miss, run_spec, specs
from hypothesis import given

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def check(spec: Spec) -> Outcome:
    outcome = run_spec(spec)
    problems = record_problems(spec, outcome)
    error = outcome.error()
    assert error < TOLERANCE[spec.dtype], f"miscompiled: relative error {error:.2e} for {spec}"
    assert outcome.reports and not problems, f"{problems} for {spec}"
    return outcome


@given(specs())
def test_any_formulation_is_found_and_exact(spec: Spec) -> None:
    check(spec)


PLAIN = Spec(product="matmul", cache="index_copy", length=3)

#: One choice changed at a time from a plain cached causal attention: every name in the grammar's tables is run at least
#: once.
ONE_BY_ONE = [
    (field, value)
    for field, values in (
        ("product", grammar.PRODUCTS),
        ("repeat", grammar.REPEATS),
        ("scale", grammar.SCALES),
        ("mask", grammar.MASKS),
        ("mask_style", grammar.MASK_STYLES),
        ("softmax", grammar.SOFTMAXES),
        ("rotary", grammar.ROTARIES),
        ("tables", grammar.TABLES),
        ("projection", grammar.PROJECTIONS),
        ("cache", grammar.CACHES),
        ("bias", ("table", "alibi")),
        ("sinks", (True,)),
        ("softcap", (True,)),
    )
    for value in values
    if value != getattr(PLAIN, field)
]


@pytest.mark.parametrize(("field", "value"), ONE_BY_ONE, ids=lambda v: str(v))
def test_each_choice_alone(field: str, value: object) -> None:
    plain = dataclasses.asdict(PLAIN)
    if field == "mask":  # some masks leave unwritten slots in sight
        plain["cache"] = "none"
    check(grammar._normal(plain | {field: value}))


# ---- near misses -----------------------------------------------------------------------------------------------------


@functools.cache
def positive(cached: bool) -> Outcome:
    """The twin that every near miss differs from by one thing: the pass is active on it."""
    return run_near_miss("cache_rolled" if cached else "softmax_over_heads", miss=False)


@pytest.mark.parametrize("kind", sorted(NEAR_MISSES))
def test_near_miss(kind: str) -> None:
    twin = positive(any(word in kind for word in ("cache", "slot", "stored")))
    assert all(r.rewritten == 1 for r in twin.reports) and twin.reports, "the pass is not active on the positive twin"
    assert twin.error() < 1e-5
    outcome = run_near_miss(kind, miss=True)
    if kind != "dropout_in_training":  # random by nature
        assert outcome.error() < 1e-4, f"miscompiled {kind}: {outcome.error():.2e}"
    if NEAR_MISSES[kind]:
        for report in outcome.reports:
            assert report.rewritten == 0, f"{kind} was taken for attention:\n{report}"
            assert any(s.status == "declined" and s.reason for s in report.sites), (
                f"no reason given for {kind}:\n{report}"
            )


@pytest.mark.parametrize(
    "kind",
    [k for k in NEAR_MISSES if k.startswith("rotation_")] + ["cos_per_head"],
)
def test_other_rotations_are_not_read_as_rotary(kind: str) -> None:
    """A rotation that is none of the forms is carried as part of the key, never as the form that it resembles."""
    outcome = run_near_miss(kind, miss=True)
    for report in outcome.reports:
        assert [s.rotary for s in report.sites] == ["none"], f"{kind}:\n{report}"
    assert outcome.error() < 1e-4


# ---- traps named in the issue ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        Spec(product="matmul", scale="scores_mul", scale_value=0.37, head_dim=16),
        Spec(product="matmul", mask="causal_padding", mask_style="masked_fill"),
        Spec(product="sdpa", mask="causal_padding", mask_style="additive"),
        Spec(product="matmul", mask="sliding", length=2),
        Spec(product="matmul", mask="sliding", length=3),
        Spec(product="matmul", mask="sliding", length=4),
        Spec(product="matmul", dtype=torch.bfloat16, mask_style="additive_other_dtype"),
        Spec(product="matmul", rotary="complex", tokens_first=True, cache="slice"),
        Spec(product="matmul", bias="table", sinks=True, cache="index_copy"),
        Spec(product="sdpa", mask="is_causal", length=8, dynamic=True),
        Spec(product="grouped_einsum", batch=1, kv_heads=1, cache="index_put", rotary="half_partial", length=2),
        Spec(product="matmul", batch=4, length=4, heads=4, kv_heads=4, head_dim=4),
        Spec(product="bmm", batch=4, length=4, heads=4, kv_heads=2, head_dim=4, cache="scatter"),
        Spec(product="einsum", batch=1, heads=1, kv_heads=1, length=2),
    ],
    ids=lambda s: f"{s.product}-{s.mask}-{s.mask_style}-{s.rotary}-{s.cache}-{s.batch}x{s.length}x{s.heads}",
)
def test_trap(spec: Spec) -> None:
    check(spec)


def test_positions_in_slices_do_not_recompile_each_step() -> None:
    outcome = run_spec(Spec(product="matmul", cache="slice", length=4))
    assert len(outcome.reports) <= 3, f"{len(outcome.reports)} graphs for a prefill and three decode steps"
