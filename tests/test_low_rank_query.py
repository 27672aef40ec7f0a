"""Option ``query_rank``: equal to the dense projection at full rank in every spelling, the best there is at lower
ranks, refused with its arithmetic where it does not pay, declined with a reason where it cannot be.
"""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_exact import compiled
from tiny import llama, rollout, static_cache
from torch import Tensor, nn

import sals_compile
from sals_compile.basis import factor_projection
from sals_compile.calibrate import Calibration, CalibrationError, calibrate
from sals_compile.passes import low_rank_query as pass_
from sals_compile.passes.ir import Mismatch

HEADS, KV_HEADS, DIM = 4, 2, 8
WIDTH = HEADS * DIM
SMALL = {"budget": 24, "sinks": 1, "recents": 8, "query_block": 8, "value_bits": 8}

SPELLINGS = ("separate", "bias", "added bias", "fused", "fused, query last", "chunk", "columns", "norm", "einsum")
DECLINED = {
    "two products": "made of 2 products",
    "heads interleaved": "read by more than the site's queries",
    "shared with the key": "read by more than the site's queries",
    "returned": "read by more than the site's queries",
    "computed weight": "no product with a parameter",
}


class Projected(nn.Module):
    """Causal self-attention ``[B,S,C]`` whose queries are projected in one of many spellings."""

    def __init__(self, spelling: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spelling = spelling
        kv = KV_HEADS * DIM
        self.q = nn.Linear(WIDTH, WIDTH, bias=spelling in ("bias", "fused"))
        self.k = nn.Linear(WIDTH, kv)
        self.v = nn.Linear(WIDTH, kv)
        self.fused = nn.Linear(WIDTH, WIDTH + 2 * kv, bias=spelling == "fused")
        self.thirds = nn.Linear(WIDTH, 3 * WIDTH)
        self.columns = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.gain = nn.Parameter(1 + torch.rand(DIM))
        self.extra = nn.Parameter(torch.randn(WIDTH))
        self.to(dtype).requires_grad_(False)

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kv = KV_HEADS * DIM
        if self.spelling == "fused":
            return self.fused(x).split([WIDTH, kv, kv], -1)
        if self.spelling == "fused, query last":
            whole = self.fused(x)
            return whole[..., 2 * kv :], whole[..., :kv], whole[..., kv : 2 * kv]
        if self.spelling == "chunk":
            return self.thirds(x).chunk(3, -1)
        if self.spelling == "heads interleaved":
            return self.thirds(x).unflatten(-1, (HEADS, 3 * DIM)).split(DIM, -1)
        query = {
            "columns": lambda: x @ self.columns,
            "added bias": lambda: self.q(x) + self.extra,
            "two products": lambda: self.q(x) + self.up(self.down(x)),
            "computed weight": lambda: x @ (self.columns * self.columns.sigmoid()),
            "einsum": lambda: torch.einsum("bsi,io->bso", x, self.columns),
        }.get(self.spelling, lambda: self.q(x))()
        key = query[..., :kv] if self.spelling == "shared with the key" else self.k(x)
        return query, key, self.v(x)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        batch, length, _ = x.shape
        query, key, value = (t.reshape(batch, length, -1, DIM) for t in self.projections(x))
        seen = query
        if self.spelling == "norm":
            query = query * (query.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype) * self.gain
        angles = torch.arange(length)[:, None] / 100 ** (torch.arange(DIM // 2) * 2 / DIM)
        cos, sin = (f(torch.cat((angles, angles), -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        query, key = (t * cos + torch.cat((-t[..., DIM // 2 :], t[..., : DIM // 2]), -1) * sin for t in (query, key))
        gqa = query.shape[1] != key.shape[1]
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)
        out = out.transpose(1, 2).flatten(2)
        return (out, seen) if self.spelling == "returned" else out


def outputs(module: nn.Module, x: Tensor, **options):
    """Of the second call (the first is the calibration), and the site's report."""
    run = compiled(module, **SMALL, **options)
    with torch.no_grad():
        run(x)
        found = run(x)
    (site,) = sals_compile.compiled_reports()[-1].sites
    return found[0] if isinstance(found, tuple) else found, site


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_full_rank_equals_the_dense_projection(spelling, dtype, monkeypatch):
    module, x = Projected(spelling, dtype), torch.randn(2, 64, WIDTH, dtype=dtype)
    expected, site = outputs(module, x)
    assert site.status == "sals"
    monkeypatch.setattr(pass_, "check_price", lambda *_: None)  # full rank never pays
    actual, site = outputs(module, x, query_rank=WIDTH)
    assert site.query_rank == WIDTH and site.query_retained == pytest.approx(1.0), site.reason
    if dtype is torch.float32:  # in bf16 a rounding may select another token
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    error = (actual - expected).float().norm() / expected.float().norm()
    assert error < 0.1, error


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_low_rank_reaches_the_queries_and_nothing_else(spelling):
    """The graph computes queries of the rank, and keys and values as before."""
    module, x = Projected(spelling), torch.randn(1, 64, WIDTH)
    _, site = outputs(module, x, query_rank=5)
    assert site.query_rank == 5, site.reason
    graph = sals_compile.compiled_reports()[-1]
    thin = [n for n in graph.state_inputs if n.kind == "query"]
    assert {n.field for n in thin} == {"down", "up", "shift"}
    plan = graph.plans[0]
    made = plan.low_rank_query
    weight = {"columns": module.columns.T, "einsum": module.columns.T}.get(spelling)
    if weight is None:
        owner = {"fused": module.fused, "fused, query last": module.fused, "chunk": module.thirds}.get(
            spelling, module.q
        )
        weight = owner.weight
    start, stop = made.projection.rows or (0, weight.shape[0])
    assert stop - start == WIDTH
    down, up, _, kept = factor_projection(weight[start:stop], 5, None, None)
    assert kept == pytest.approx(made.retained)
    left, right = (weight[start:stop] @ x[0].T, up @ (down @ x[0].T))
    assert torch.linalg.matrix_rank(right) == 5 and (left - right).norm() < left.norm()


@pytest.mark.parametrize("spelling", DECLINED)
def test_declined_with_the_reason_and_left_as_it_was(spelling):
    module, x = Projected(spelling), torch.randn(1, 64, WIDTH)
    expected, site = outputs(module, x)
    assert site.status == "sals", site.reason
    actual, site = outputs(module, x, query_rank=4)
    assert site.query_rank == 0 and DECLINED[spelling] in site.reason, site.reason
    torch.testing.assert_close(actual, expected)


def test_a_rank_that_does_not_pay_is_refused_with_its_arithmetic(caplog):
    module, x = Projected("separate"), torch.randn(1, 64, WIDTH)
    expected, _ = outputs(module, x)
    with caplog.at_level(logging.WARNING, logger="sals_compile"):
        actual, site = outputs(module, x, query_rank=16)
    for text in ("16 x (32 + 32) = 1024 weights", "2048 FLOPs", "4096 bytes", "32 x 32 = 1024", "ranks up to 15 pay"):
        assert text in site.reason
    assert "query_rank=16 has no effect" in caplog.text and "does not pay" in caplog.text
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert outputs(module, x, query_rank=15)[1].query_rank == 15


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 400))
def test_what_pays_is_exactly_what_is_cheaper(rank, inputs, outputs):
    if rank * (inputs + outputs) < inputs * outputs:
        pass_.check_price(rank, inputs, outputs, 2)
        return
    with pytest.raises(Mismatch, match="does not pay") as refused:
        pass_.check_price(rank, inputs, outputs, 2)
    largest = int(str(refused.value).split("ranks up to ")[1].split()[0])
    assert largest < rank and (largest + 1) * (inputs + outputs) >= inputs * outputs
    if largest:
        pass_.check_price(largest, inputs, outputs, 2)


@given(st.integers(2, 12), st.integers(2, 12), st.integers(1, 12), st.integers(0, 1000))
def test_factors_are_the_best_of_their_rank(inputs, outputs, rank, seed):
    """The error is the variance of the eigenvalues left out, and the map by the weights alone has no less."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(50, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    x = (x + torch.randn(inputs, generator=generator)).double()
    y = x @ weight.T.double()
    rank = min(rank, outputs)
    statistics = (y.mean(0), torch.cov(y.T, correction=0).reshape(outputs, outputs))
    total = float((y - y.mean(0)).square().sum())

    def error(down, up, shift):
        return float((y - x @ (up.double() @ down.double()).T - shift.double()).square().sum())

    *factors, kept = factor_projection(weight, rank, statistics, None)
    assert factors[0].shape == (rank, inputs) and factors[1].shape == (outputs, rank)
    assert error(*factors) == pytest.approx((1 - kept) * total, rel=1e-3, abs=1e-5 * float(y.square().sum()))
    *plain, _ = factor_projection(weight, rank, None, None)
    assert error(*factors) <= error(*plain) * (1 + 1e-5) + 1e-5 * float(y.square().sum())
    share = max(min(kept, 1 - 1e-9), 1e-9)
    assert factor_projection(weight, share, statistics, None)[1].shape[1] <= rank


def test_a_calibration_holds_the_outputs_mean_and_covariance(tmp_path):
    model = llama()
    tokens = torch.randint(0, 64, (4, 128))
    made = calibrate(model, [tokens], progress=False, projections=True)
    plain = calibrate(model, [tokens], progress=False)
    assert all(m.projected_moment.numel() == 0 for m in plain.sites.values())
    seen = []
    hook = model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda m, i, o: seen.append(o))
    with torch.no_grad():
        model(tokens)
    hook.remove()
    y = seen[0].flatten(0, 1)
    mean, covariance = made.projected("model.layers.1.self_attn", 64)
    torch.testing.assert_close(mean, y.double().mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(covariance, torch.cov(y.T.double(), correction=0), rtol=1e-3, atol=1e-6)
    moment = made.sites["model.layers.1.self_attn"].projected_moment
    made.save(tmp_path / "with.safetensors")
    plain.save(tmp_path / "without.safetensors")
    loaded = Calibration.load(tmp_path / "with.safetensors")
    torch.testing.assert_close(loaded.sites["model.layers.1.self_attn"].projected_moment, moment)
    assert Calibration.load(tmp_path / "without.safetensors").projected("model.layers.1.self_attn", 64) is None
    merged = made.merge(loaded)
    torch.testing.assert_close(merged.sites["model.layers.1.self_attn"].projected_moment, 2 * moment)
    with pytest.raises(CalibrationError, match="projections="):
        made.merge(plain)
    with pytest.raises(CalibrationError, match="query projection of 64 outputs"):
        made.projected("model.layers.1.self_attn", 32)


def test_a_share_of_variance_picks_each_sites_rank():
    model = llama()
    tokens = torch.randint(0, 64, (4, 128))
    made = calibrate(model, [tokens], progress=False, projections=True)
    options = {"budget": 24, "sinks": 2, "recents": 8, "calibration": made}
    cuts = [40, 41, 42]
    rollout(compiled(model.forward, query_rank=0.8, **options), tokens[:1, :42], cuts, static_cache(model, 60))
    sites = sals_compile.compiled_reports()[-1].sites
    assert all(0 < s.query_rank < 32 and s.query_retained >= 0.8 for s in sites)
    for site in sites:
        weight = model.get_submodule(site.name).q_proj.weight
        lower = factor_projection(weight, site.query_rank - 1, made.projected(site.name, 64), None)[3]
        assert lower < 0.8


def test_weights_written_to_after_compiling_are_factored_anew():
    """The decode graph never answers with factors of weights that are gone."""
    model = llama()
    tokens = torch.randint(0, 64, (1, 60))
    cuts = [40, *range(41, 61)]
    options = {"budget": 24, "sinks": 2, "recents": 8, "query_rank": 16, "basis": "weights"}
    run = compiled(model.forward, **options)
    before = rollout(run, tokens, cuts, static_cache(model, 64))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.copy_(layer.self_attn.q_proj.weight.flip(0))
    after = rollout(run, tokens, cuts, static_cache(model, 64))
    fresh = rollout(compiled(model.forward, **options), tokens, cuts, static_cache(model, 64))
    assert (after - before).norm() > 0.01 * before.norm()
    torch.testing.assert_close(after, fresh, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [0, -3, 1.0, 0.0, 1.5, True, "512"])
def test_a_bad_rank_is_refused(value):
    with pytest.raises(sals_compile.OptionError, match="query_rank"):
        sals_compile.SalsConfig.from_options({"query_rank": value})


def test_exact_mode_and_factored_queries_exclude_each_other():
    with pytest.raises(sals_compile.OptionError, match="approximate"):
        sals_compile.SalsConfig.from_options({"query_rank": 8, "attention": "exact"})
