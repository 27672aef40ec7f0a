"""MLIR: the text that torch-mlir makes of a rewritten graph, and the same graph run by IREE on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny import Attention, CachedAttention

import sals_compile

pytest.importorskip("torch_mlir", reason="the extra `mlir` is not installed (torch-mlir)")

from sals_compile import mlir
from sals_compile.kernels import reference
from sals_compile.passes import lower_mlir

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))


@pytest.fixture
def iree():
    pytest.importorskip("iree.compiler", reason="the extra `mlir` is not installed (iree-base-compiler)")
    pytest.importorskip("iree.runtime", reason="the extra `mlir` is not installed (iree-base-runtime)")


def compiled(fn, **options):
    torch._dynamo.reset()
    sals_compile.report._reports.clear()
    return torch.compile(fn, backend="sals", options={"lowering": "mlir", **options})


@pytest.mark.parametrize("dialect", ["torch", "linalg"])
@pytest.mark.parametrize("attention", ["exact", "sals"])
def test_export_holds_no_operator_of_ours(dialect, attention):
    module = CachedAttention(4, 2, 16, True, "bool", False, 0.25).eval()
    keys, values = torch.zeros(1, 2, 64, 16), torch.zeros(1, 2, 64, 16)
    options = {"attention": attention, "budget": 24, "sinks": 2, "recents": 8}
    text = mlir.export(module, torch.randn(1, 1, 64), torch.tensor(40), keys, values, dialect=dialect, options=options)
    assert "func.func @main" in text
    assert "sals" not in text
    assert ("linalg.generic" in text) == (dialect == "linalg")
    assert ("torch.aten.mm" in text) == (dialect == "torch")


def test_a_bad_dialect_is_named():
    with pytest.raises(sals_compile.OptionError, match="dialect='tosa'"):
        mlir.export(torch.nn.Identity(), torch.zeros(1), dialect="tosa")


@pytest.mark.parametrize("k", [1, 5, 16, 20])
def test_the_select_formulation_equals_the_reference(k):
    scores = torch.randint(-3, 4, (3, 2, 16)).float()
    scores[0, 0, 3:9] = torch.inf
    scores[1, :, ::2] = -torch.inf
    scores[2, 1] = -torch.inf
    scores[2, 0, 5] = torch.nan
    assert torch.equal(lower_mlir.select(scores, k), reference.select(scores, k))


def test_an_operator_that_does_not_lower_is_named_with_its_origin():
    class Odd(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.eigvals(x) if x.dim() == 2 else x

    gm = torch.fx.Graph()
    x = gm.placeholder("x")
    gm.output(gm.call_function(torch.ops.aten._fft_r2c.default, (x, [0], 0, True)))
    with pytest.raises(lower_mlir.MlirError, match=r"_fft_r2c"):
        lower_mlir.to_mlir(torch.fx.GraphModule(Odd(), gm), [torch.zeros(8)], "linalg")


class Spectral(torch.nn.Module):
    """MLIR has no lowering of a Fourier transform."""

    def forward(self, x):
        return torch.fft.rfft(x).abs().sum(-1, keepdim=True) + x


@pytest.mark.parametrize("dialect", ["torch", "linalg"])
@pytest.mark.parametrize("where", ["mixer", "attention"])
def test_what_does_not_lower_is_reported_by_operator_and_site(monkeypatch, where, dialect):
    """In a module beside the attention, and within a site (as if selection could not be lowered)."""

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = CachedAttention(4, 2, 16, True, "bool", False, 0.25)
            self.mixer = Spectral() if where == "mixer" else torch.nn.Identity()

        def forward(self, x, position, keys, values):
            return self.mixer(self.attention(x, position, keys, values))

    if where == "attention":
        plain = lower_mlir.select
        monkeypatch.setattr(lower_mlir, "select", lambda scores, k: plain(Spectral()(scores), k))
    keys, values = torch.zeros(1, 2, 64, 16), torch.zeros(1, 2, 64, 16)
    call = (Mixed().eval(), torch.randn(1, 1, 64), torch.tensor(40), keys, values)
    with pytest.raises(lower_mlir.MlirError, match=rf"aten\._fft_r2c \(from {where}") as caught:
        mlir.export(*call, dialect=dialect, options={"budget": 24, "sinks": 2, "recents": 8})
    assert str(caught.value).count("(from ") == 1


@pytest.mark.slow
def test_llama_like_decode_equals_exact_mode(iree):
    """The forty-line model of examples/quickstart.py, prefill and decode."""
    import quickstart

    torch.manual_seed(0)
    model = quickstart.Model(width=64, layers=2, capacity=96).eval()
    prompt = torch.randint(0, 256, (1, 40))
    run = compiled(model, attention="exact")
    actual = quickstart.generate(run, model.new_cache(), prompt, 6)
    assert sals_compile.compiled_reports()[-1].rewritten == 2
    eager = torch.compile(model, backend="sals", options={"lowering": "eager", "attention": "exact"})
    torch._dynamo.reset()
    expected = quickstart.generate(eager, model.new_cache(), prompt, 6)
    dense = quickstart.generate(model, model.new_cache(), prompt, 6)
    assert (actual - expected).norm() / expected.norm() < 1e-4
    assert (actual - dense).norm() / dense.norm() < 1e-4


@pytest.mark.parametrize("eager", [False, True])
def test_encoder_equals_dense(iree, eager):
    module = Attention(4, 2, 16, rotary=True, causal=False, eager=eager).eval()
    x = torch.randn(2, 20, 64)
    with torch.no_grad():
        expected, actual = module(x), compiled(module, attention="exact")(x)
    assert [s.status for s in sals_compile.compiled_reports()[0].sites] == ["exact"]
    assert (actual - expected).norm() / expected.norm() < 1e-4


@pytest.mark.slow
def test_sparse_decode_equals_the_eager_lowering(iree):
    """Quantised latents and selection included; the buffers that the graph writes are copied back."""
    module = CachedAttention(4, 2, 16, True, "bool", False, 0.25).eval()
    x, cuts = torch.randn(1, 36, 64), [32, 33, 34, 35, 36]
    options = {"budget": 24, "sinks": 2, "recents": 8}
    actual = module.rollout(compiled(module, **options), x, cuts, 64)
    assert sals_compile.compiled_reports()[-1].sites[0].status == "sals"
    torch._dynamo.reset()
    eager = torch.compile(module, backend="sals", options={"lowering": "eager", **options})
    expected = module.rollout(eager, x, cuts, 64)
    assert (actual - expected).norm() / expected.norm() < 1e-3
