"""Fuzzed formulations of attention are found, recorded as meant and equal to the dense graph; near misses are declined
and stay right."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from types import SimpleNamespace

import formulations as grammar
import pytest
import torch
from formulations import NEAR_MISSES, Outcome, Spec, judge, run_near_miss, run_spec, specs
from hypothesis import HealthCheck, given, seed, settings
from torch import nn

import sals_compile


def check(spec: Spec) -> None:
    problem = judge(spec)
    assert problem is None, ": ".join(problem)


#: How many, and from where; a long run that counts what is wrong instead of stopping at it: ``python tests/fuzz.py``.
EXAMPLES = int(os.environ.get("SALS_FUZZ_EXAMPLES", 5000 if os.environ.get("SALS_TEST_PROFILE") == "deep" else 12))


@pytest.mark.timeout(max(900, 30 * EXAMPLES))
@seed(int(os.environ.get("SALS_FUZZ_SEED", 0)))
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
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


#: Near misses of a rotation, and what the report says of each.
TURNS = {
    "rotation_mixes_tokens": "mixes tokens or heads (aten.roll",
    "rotation_mixes_heads": "mixes tokens or heads (aten.flip",
    "rotation_of_other_tensor": "mixes tokens or heads (aten.flip",
    "rotation_with_same_halves": "is no rotation",
    "rotation_interleaved_joined_as_halves": "is no rotation of pairs",
    "rotation_of_shifted_part": "is no rotation of pairs",
    "cos_per_head": "is no rotation of pairs",
}


@pytest.mark.parametrize("kind", TURNS)
def test_other_rotations_are_not_read_as_rotary(kind: str) -> None:
    """What is no rotation of pairs stays part of the key, whose latent is taken after it; the report says why."""
    outcome = run_near_miss(kind, miss=True)
    assert outcome.reports and outcome.error() < 1e-4
    for report in outcome.reports:
        (site,) = report.sites
        assert site.rotary == "none" and TURNS[kind] in site.reason, report
        assert "latent is taken after the turn" in site.reason


@pytest.mark.parametrize("kind", ["values_are_keys"])
def test_unusual_but_attention(kind: str) -> None:
    """What looks like a miss and is attention: found, not only left right."""
    outcome = run_near_miss(kind, miss=True)
    assert outcome.error() < 1e-4
    assert outcome.reports and all(r.rewritten == 1 for r in outcome.reports)


# ---- traps named in the issue ----------------------------------------------------------------------------------------


TRAPS = {
    "scale 0.37 at D = 16": Spec(product="matmul", scale="scores_mul", scale_value=0.37, head_dim=16),
    "left padding, rows masked whole": Spec(product="matmul", mask="causal_padding", mask_style="masked_fill"),
    "left padding, rows masked whole, added": Spec(product="sdpa", mask="causal_padding", mask_style="additive"),
    "window longer than the sequence": Spec(product="matmul", mask="sliding", length=2),
    "window as long as the sequence": Spec(product="matmul", mask="sliding", length=3),
    "window one shorter than the sequence": Spec(product="matmul", mask="sliding", length=4),
    "window's edge in a cache": Spec(product="matmul", mask="sliding", length=4, cache="index_copy"),
    "mask + scores": Spec(product="matmul", mask_style="bool", cache="index_copy"),
    "bias + scores": Spec(product="matmul", bias="table", mask_style="bool"),
    "fp16 and fp32's smallest number": Spec(
        product="matmul", dtype=torch.float16, mask_style="additive_other_dtype", mask="causal_padding"
    ),
    "bf16 and fp32's smallest number": Spec(product="matmul", dtype=torch.bfloat16, mask_style="additive_other_dtype"),
    "complex rotary of a transposed input": Spec(product="matmul", rotary="complex", tokens_first=True, cache="slice"),
    "bias and sinks together": Spec(product="matmul", bias="table", sinks=True, cache="index_copy"),
    "is_causal of symbolic lengths": Spec(product="sdpa", mask="is_causal", length=8, dynamic=True),
    "batch of one and one head, folded": Spec(
        product="grouped_einsum", batch=1, kv_heads=1, cache="index_put", rotary="half_partial", length=2
    ),
    "B = L = H = D": Spec(product="matmul", batch=4, length=4, heads=4, kv_heads=4, head_dim=4),
    "B = L = H = D, grouped": Spec(product="bmm", batch=4, length=4, heads=4, kv_heads=2, head_dim=4, cache="scatter"),
    "B = L = H = D, turned": Spec(product="turned", batch=4, length=4, heads=4, kv_heads=4, head_dim=4),
    "one key, turned, grouped": Spec(product="turned_values", repeat="interleave", length=1, mask="prefix"),
    "one key, turned, of one KV head": Spec(
        product="turned_values", heads=6, kv_heads=1, batch=4, length=1, mask="prefix", projection="fused_per_head"
    ),
    "nothing but ones": Spec(product="einsum", batch=1, heads=1, kv_heads=1, length=2),
    "interleaved rotary": Spec(product="matmul", rotary="interleaved", cache="index_copy"),
    "interleaved rotary, pairwise": Spec(product="matmul", rotary="interleaved_pairwise", cache="index_copy"),
}


@pytest.mark.parametrize("spec", TRAPS.values(), ids=TRAPS.keys())
def test_trap(spec: Spec) -> None:
    check(spec)


class Permuted(nn.Module):
    """The key reaches the product through ``permute(0, 2, 3, 1)``: of ``[B,L,H,D]`` that is ``k^T``, of ``[B,H,L,D]``
    it is another computation that has the same shapes where B = H = L = D."""

    #: another number of heads than the shapes have: nobody may ask it
    config = SimpleNamespace(num_attention_heads=7, num_key_value_heads=7, head_dim=3)

    def __init__(self, head_dim: int, tokens_first: bool) -> None:
        super().__init__()
        self.head_dim, self.tokens_first = head_dim, tokens_first
        self.maps = nn.ModuleList(nn.Linear(16, 4 * head_dim, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (m(x).view(batch, length, 4, self.head_dim) for m in self.maps)
        q, v = q.transpose(1, 2), v.transpose(1, 2)
        k = k.permute(0, 2, 3, 1) if self.tokens_first else k.transpose(1, 2).permute(0, 2, 3, 1)
        return (torch.softmax(q @ k / 2.0, -1) @ v).transpose(1, 2).flatten(2)


def run_module(module: nn.Module, *calls: tuple[torch.Tensor, ...], **options: object) -> Outcome:
    valid = [torch.ones(c[0].shape[:2], dtype=torch.bool) for c in calls]
    return grammar.run(module.eval(), calls, valid, **options)


@pytest.mark.parametrize(("length", "head_dim"), [(4, 4), (4, 8), (8, 4)])
def test_permuted_key(length: int, head_dim: int) -> None:
    right = run_module(Permuted(head_dim, tokens_first=True), (torch.randn(4, length, 16),))
    assert right.error() < 1e-5
    (report,) = right.reports
    (site,) = (p.site for p in report._compiled.plans)
    assert (site.heads, site.kv_heads, site.head_dim) == (4, 4, head_dim)
    if length == head_dim == 4:
        wrong = run_module(Permuted(head_dim, tokens_first=False), (torch.randn(4, length, 16),))
        assert wrong.error() < 1e-5
        (report,) = wrong.reports
        # Heads stand where tokens would and tokens where heads would: attention still, and to be recorded as it is.
        for plan in report._compiled.plans:
            assert plan.site.key.layout != site.key.layout


@pytest.mark.parametrize("product", [p for p in grammar.PRODUCTS if not p.startswith("sdpa")])
@pytest.mark.parametrize("kind", ["softmax_over_queries", "softmax_over_heads"])
def test_softmax_over_another_axis(kind: str, product: str) -> None:
    """In every spelling of the products, and where all sizes agree."""
    sizes = {"batch": 4, "length": 4, "heads": 4, "kv_heads": 4, "head_dim": 4} if product != "flat" else {"length": 4}
    spec = grammar._normal(dataclasses.asdict(Spec(product=product, mask="none", **sizes)))
    if product == "flat" and kind == "softmax_over_heads":
        pytest.skip("a matrix has no heads")
    axis = -3 if kind == "softmax_over_heads" else -1 if spec.turned else -2

    class Wrong(grammar.Formulation):
        def softmax(self, logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return torch.softmax(logits, axis)

    call = grammar.calls_of(spec)[0]
    outcome = run_module(Wrong(spec), call)
    assert outcome.error() < 1e-5
    for report in outcome.reports:
        assert report.rewritten == 0 and [s.status for s in report.sites] == ["declined"], report


def test_layer_that_reuses_the_cache_of_the_layer_before() -> None:
    """Both sites or none: half of a shared cache in latents would leave the other half unread."""
    for kind in ("cache_of_layer_before", "cache_shared_by_two_sites"):
        outcome = run_near_miss(kind, miss=True)
        assert outcome.error() < 1e-4
        for report in outcome.reports:
            assert report.rewritten in (0, 2), f"{kind}:\n{report}"
            assert report.rewritten == 2 or any(s.status == "declined" and s.reason for s in report.sites), report


def test_router_and_classifier_are_not_reported() -> None:
    """A softmax of a learned map is no attention, and no near miss of it either."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            return (x[..., None, None, :] @ self.experts[chosen]).squeeze(-2).mul(weights[..., None]).sum(-2)

    outcome = run_module(Router(), (torch.randn(2, 5, 16),))
    assert [r.sites for r in outcome.reports] == [[]]


def test_fault_of_ours_at_one_site_is_a_decline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other site is rewritten, the graph is right, and the traceback is in the log for whoever asks for it."""
    from sals_compile.passes.match import attention

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Permuted(4, True), Permuted(8, True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat((self.first(x), self.second(x)), -1)

    rule = attention.RULES[attention.SOFTMAX[0]]
    seen: list[object] = []

    def broken(node: torch.fx.Node) -> object:
        seen.append(node)
        return {}["a key that is not there"] if len(seen) == 1 else rule(node)

    monkeypatch.setitem(attention.RULES, attention.SOFTMAX[0], broken)
    with caplog.at_level(logging.DEBUG, logger="sals_compile"):
        outcome = run_module(Two(), (torch.randn(2, 5, 16),))
    assert outcome.error() < 1e-5 and len(seen) == 2
    (report,) = outcome.reports
    (declined,) = (s for s in report.sites if s.status == "declined")
    assert report.rewritten == 1
    assert "internal error while matching (KeyError)" in declined.reason and "a key that" not in declined.reason
    assert any(r.exc_info and r.levelno == logging.DEBUG for r in caplog.records)


def test_step_of_a_sliding_cache_does_not_recompile() -> None:
    """transformers' sliding layers count their tokens in Python integers."""
    from sals_compile import catalogue

    entry = next(e for e in catalogue.ENTRIES if e.name == "Mistral")
    torch._dynamo.reset()
    module = entry.build().eval()
    sals_compile.report._reports.clear()
    options = {"attention": "exact", "lowering": "eager"}
    with torch.no_grad():
        entry.drive(module, torch.compile(module.forward, backend="sals", options=options))
    graphs = sals_compile.compiled_reports()
    assert [r.rewritten for r in graphs if r.sites] == [2, 2], "a graph for the prefill and one for every decode step"


def test_positions_in_slices_do_not_recompile_each_step() -> None:
    outcome = run_spec(Spec(product="matmul", cache="slice", length=4))
    assert len(outcome.reports) <= 3, f"{len(outcome.reports)} graphs for a prefill and three decode steps"


class Pool(nn.Module):
    """Two layers whose keys and values are parts of one tensor ``[layer, key or value, B, N, S, D]`` (``pooled``), or
    buffers of their own."""

    def __init__(self, pooled: bool, write: str) -> None:
        super().__init__()
        self.pooled, self.write = pooled, write
        self.maps = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))
        self.register_buffer("pool", torch.zeros(2, 2, 2, 2, 64, 8))
        for layer in range(2):
            for kind in range(2):
                self.register_buffer(f"own{layer}{kind}", torch.zeros(2, 2, 64, 8))

    def store(self, layer: int, kind: int, new: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        buffer = self.pool[layer, kind] if self.pooled else getattr(self, f"own{layer}{kind}")
        if self.write == "index_copy":
            buffer.index_copy_(2, positions, new)
        else:
            buffer[:, :, positions] = new
        return self.pool[layer, kind] if self.pooled else buffer

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        mask = torch.arange(64) <= positions[:, None]
        for layer in range(2):
            maps = self.maps[3 * layer : 3 * layer + 3]
            q, k, v = (m(x).view(batch, length, 2, 8).transpose(1, 2) for m in maps)
            k, v = self.store(layer, 0, k, positions), self.store(layer, 1, v, positions)
            x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return x


class Turned(nn.Module):
    """Two layers that rotate by the same angles, in a spelling that is listed (``half``, ``interleaved``) or not."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.maps = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))
        self.register_buffer("frequencies", 1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8))
        for name in ("k0", "v0", "k1", "v1"):
            self.register_buffer(name, torch.zeros(2, 2, 64, 8))

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None] * self.frequencies
        if self.spelling == "matrix":
            cos, sin = angles.cos(), angles.sin()
            return torch.stack((cos, sin), -1), torch.stack((-sin, cos), -1)
        angles = angles.repeat_interleave(2, -1) if self.spelling == "interleaved" else torch.cat((angles, angles), -1)
        return angles.cos(), (-angles if self.spelling == "negated" else angles).sin()

    def rotate(self, x: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        if self.spelling == "matrix":  # the columns of two by two matrices
            pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
            return (one * pairs[..., 0] + two * pairs[..., 1]).flatten(-2)
        if self.spelling == "interleaved":
            return x * one + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * two
        a, b = x.chunk(2, -1)
        return x * one + torch.cat((b, -a) if self.spelling == "negated" else (-b, a), -1) * two

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(64) <= positions[:, None]
        tables = self.tables(positions)
        for layer in range(2):
            q, k, v = (m(x).unflatten(-1, (2, 8)).transpose(1, 2) for m in self.maps[3 * layer : 3 * layer + 3])
            keys, values = getattr(self, f"k{layer}"), getattr(self, f"v{layer}")
            keys.index_copy_(2, positions, self.rotate(k, *tables))
            values.index_copy_(2, positions, v)
            out = torch.nn.functional.scaled_dot_product_attention(self.rotate(q, *tables), keys, values, mask)
            x = x + out.transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize(("carried", "listed"), [("negated", "half"), ("matrix", "interleaved")])
def test_unlisted_rotation_is_carried(carried: str, listed: str) -> None:
    """Sparse decoding, latents un-rotated, gives what the listed spelling of the same rotation gives; both layers share
    their recorded rows."""
    from sals_compile.passes.rewrite import row_groups

    calls = [
        (torch.randn(2, b - a, 16), torch.arange(a, b)) for a, b in [(0, 40), *((t, t + 1) for t in range(40, 46))]
    ]
    options = {"attention": "sals", "budget": 24, "sinks": 2, "recents": 8, "rank": 8, "score_rank": 4}
    outcomes = []
    for spelling in (carried, listed):
        torch.manual_seed(0)
        outcomes.append(run_module(Turned(spelling), *calls, **options))
        for report in outcomes[-1].reports:
            assert [s.rotary for s in report.sites] == [listed] * 2
            assert all(("no listed spelling" in s.reason) == (spelling == carried) for s in report.sites)
            assert len(row_groups(report._compiled.plans)) == 1
    for actual, expected in zip(outcomes[0].actual, outcomes[1].actual, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert outcomes[0].error() > 1e-3, "decoding was dense, so nothing was compared"


@pytest.mark.parametrize("steps", ["prompt", "steps"])
def test_rotation_of_some_calls_only(steps: str) -> None:
    """Prompts rotated and decode steps not, or the other way round: such graphs do not share recorded rows."""

    class Sometimes(Turned):
        def rotate(self, x: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
            return super().rotate(x, one, two) if (x.shape[2] > 1) == (steps == "prompt") else x * 1.0

    spans = [(0, 40), *((t, t + 1) for t in range(40, 44))]
    calls = [(torch.randn(2, b - a, 16), torch.arange(a, b)) for a, b in spans]
    outcome = run_module(Sometimes("half"), *calls)
    assert {s.rotary for r in outcome.reports for s in r.sites} == {"half", "none"}
    assert outcome.error() < 1e-5


@pytest.mark.parametrize("write", ["index_copy", "index_put"])
def test_pool_indexed_by_layer(write: str) -> None:
    """Exact mode equals dense; sparse mode equals, to the bit, what buffers of their own give: latents of two layers in
    one storage are not mixed up."""
    torch.manual_seed(0)
    calls = [
        (torch.randn(2, b - a, 16), torch.arange(a, b)) for a, b in [(0, 40), *((t, t + 1) for t in range(40, 46))]
    ]
    exact = run_module(Pool(True, write), *calls)
    assert exact.error() < 1e-5
    assert [[p.site.cached for p in r._compiled.plans] for r in exact.reports] == [[True, True]] * len(exact.reports)
    options = {"attention": "sals", "budget": 24, "sinks": 2, "recents": 8, "rank": 8, "score_rank": 4}
    outputs = []
    for pooled in (True, False):
        torch.manual_seed(0)
        outcome = run_module(Pool(pooled, write), *calls, **options)
        assert all(r.rewritten == 2 for r in outcome.reports) and outcome.reports
        outputs.append(outcome.actual)
    dense = outcome.expected
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert not torch.equal(outputs[0][-1], dense[-1]), "decoding was dense, so nothing was compared"


@pytest.mark.parametrize("wrong", ["reads_other_layer", "overwritten_later", "not_stored", "written_at_a_tensor"])
def test_pool_that_is_not_one_buffer_per_layer(wrong: str) -> None:
    """Never taken for a cache that it is not, and always right."""

    class Wrong(Pool):
        def store(self, layer: int, kind: int, new: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if wrong == "not_stored":
                buffer = self.pool[layer, kind].index_copy(2, positions, new)
                return torch.select_scatter(self.pool[layer], buffer, 0, kind)[kind]
            if wrong == "written_at_a_tensor":
                layers = torch.full((), layer) + 0 * positions[0]
                self.pool[layers, kind, :, :, positions] = new
                return self.pool[layer, kind]
            updated = super().store(layer, kind, new, positions)
            if wrong == "overwritten_later":
                self.pool[layer, kind] *= 0.5
            return self.pool[1 - layer, kind] if wrong == "reads_other_layer" else updated

    torch.manual_seed(0)
    spans = [(0, 8), (8, 9), (9, 10)]
    outcome = run_module(
        Wrong(True, "index_copy"), *((torch.randn(2, b - a, 16), torch.arange(a, b)) for a, b in spans)
    )
    assert outcome.error() < 1e-5 and outcome.reports
    for report in outcome.reports:
        cached = [p.site for p in report._compiled.plans if p.site.cached]
        assert not cached or wrong == "reads_other_layer", report  # the second layer reads what the first has written
        assert all(s.reason and "Error" not in s.reason for s in report.sites), report
