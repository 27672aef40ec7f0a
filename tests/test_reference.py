"""Properties of the operators' reference meanings."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sals_compile.kernels import reference
from sals_compile.kernels.index_expr import KV, SCORE, Modifier, Q, const, integer, load, make, parse

FORMS = st.sampled_from(["half", "interleaved"])


def rows(tokens: int, dim: int, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(tokens, dim // 2)
    angles = torch.cat((angles, angles), -1) if form == "half" else angles.repeat_interleave(2, -1)
    return angles.cos()[:, None] * 1.1, angles.sin()[:, None] * 1.1


@given(form=FORMS, dim=st.sampled_from([8, 16]), rotary=st.sampled_from([4, 8]), tokens=st.integers(1, 9))
def test_rotary_inverse_and_transpose(form, dim, rotary, tokens):
    cos, sin = rows(tokens, rotary, form)
    x, y = torch.randn(tokens, 3, dim), torch.randn(tokens, 3, dim)
    turned = reference.apply_rotary(x, cos, sin, form)
    torch.testing.assert_close(reference.invert_rotary(turned, cos, sin, form), x, rtol=1e-4, atol=1e-5)
    transposed = reference.apply_rotary_transpose(y, cos, sin, form)
    torch.testing.assert_close((turned * y).sum(), (transposed * x).sum(), rtol=1e-3, atol=1e-3)


@given(
    total=st.integers(1, 80),
    k=st.integers(1, 90),
    kind=st.sampled_from(["ties", "random", "masked", "constant", "nan"]),
)
def test_select_is_exact(total, k, kind):
    scores = torch.randn(total)
    if kind == "ties":
        scores = scores.round()
    elif kind == "masked":
        scores[::2] = -torch.inf
    elif kind == "constant":
        scores[:] = 0.0
    elif kind == "nan":
        scores[::3], scores[1::3] = torch.nan, torch.inf
    chosen = reference.select(scores, k)
    clean = torch.where(scores.isnan(), -torch.inf, scores)
    order = torch.sort(clean, descending=True, stable=True).indices[:k]
    expected = order[clean[order] > -torch.inf].sort().values
    assert chosen.shape == (k,)
    assert (chosen[: len(expected)].long() == expected).all()
    assert (chosen[len(expected) :] == -1).all()


@given(dim=st.sampled_from([4, 16, 64, 96]), bits=st.sampled_from([2, 4, 8]))
def test_value_codes_are_packed_as_documented(dim, bits):
    """Byte ``i`` holds dims ``i + j * D * bits / 8`` from the lowest bits up."""
    value = torch.randn(3, 2, dim)
    packed, scales = reference.quantize_values(value, bits)
    width = dim * bits // 8
    assert packed.shape == (3, 2, width) and packed.dtype == torch.uint8
    step, low = (s.float().repeat_interleave(reference.value_group(dim, bits), -1) for s in scales.unbind(-1))
    found = reference.dequantize_values(packed, scales, dim)
    for i in range(dim):
        code = (packed[..., i % width] >> (bits * (i // width))) & (2**bits - 1)
        torch.testing.assert_close(found[..., i], code.float() * step[..., i] + low[..., i])


def test_two_bit_levels_are_fitted():
    """Close to the best of four levels for Gaussian groups (0.092), and right where there is nothing to fit."""
    value = torch.randn(4000, 1, 64, generator=torch.Generator().manual_seed(0))
    error = reference.dequantize_values(*reference.quantize_values(value, 2), 64) - value
    assert float(error.square().mean()) < 0.1
    for constant in (0.0, 3.0, 1e-3, -700.0):
        value = torch.full((1, 1, 64), constant)
        found = reference.dequantize_values(*reference.quantize_values(value, 2), 64)
        torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-6)


@given(dim=st.sampled_from([16, 32, 64, 80, 96]), bits=st.sampled_from([4, 8]))
def test_value_codes_are_within_half_a_step(dim, bits):
    transform = reference.hadamard(dim)
    torch.testing.assert_close(transform @ transform.T, torch.eye(dim), rtol=1e-5, atol=1e-5)
    value = torch.randn(2, 5, 3, dim) @ transform
    codes, scales = reference.quantize_values(value, bits)
    error = (reference.dequantize_values(codes, scales, dim) - value).abs()
    step = scales[..., 0].float().repeat_interleave(reference.value_group(dim, bits), -1)
    assert (error <= 0.51 * step + 4e-3).all()  # fp16 minimum and step


def test_latent_codes():
    latent = torch.randn(4, 7, 96)
    codes, scales = reference.quantize_latent(latent)
    assert ((reference.dequantize_latent(codes, scales) - latent).norm() / latent.norm()) < 0.01
    assert reference.quantize_latent(torch.zeros(1, 8))[0].abs().sum() == 0


def test_index_expressions_round_trip_and_print():
    mask = make("and", make("le", KV, make("add", Q, load(0))), make("gt", KV, make("sub", Q, const(128))))
    assert parse(mask.serialized) == mask
    assert str(mask) == "(kv <= (q + a0)) & (kv > (q - 128))"
    capped = Modifier(mask, make("mul", const(30.0), make("tanh", make("div", SCORE, const(30.0)))))
    assert Modifier.parse(capped.serialized) == capped


@settings(max_examples=25)
@given(st.integers(1, 90), st.integers(0, 60), st.sampled_from([1, 5, 16, 24, 40, 64]), st.integers(1, 40))
def test_a_block_selects_only_what_one_of_its_queries_may_attend(queries, past, query_block, k):
    total, window = past + queries, 30
    causal = make("le", KV, make("add", Q, integer(0)))
    near = make("gt", KV, make("sub", make("add", Q, integer(0)), const(window)))
    basis = torch.randn(16, 8)
    rows = torch.randn(2, 1, total, 8)
    chosen = reference.block_select(
        torch.randn(1, queries, 4, 8), torch.randn(1, total, 2, 8), *rows, basis, basis.T,
        Modifier(make("and", causal, near)).serialized, [], [past], query_block, k, 3, 4, "half",
    )[0]  # fmt: skip
    for block, selected in enumerate(chosen.tolist()):
        first, last = past + block * query_block, past + min((block + 1) * query_block, queries) - 1
        kept = [j for j in selected if j >= 0]
        assert kept == sorted(set(kept)) and selected == kept + [-1] * (k - len(kept))
        assert all(first - window < j <= last for j in kept)
        assert len(kept) == min(k, last - max(first - window, -1))


def test_a_key_that_few_queries_look_for_is_selected():
    """Four of 64 queries look for key 7, the others away from it: by their mean it would be the last."""
    total, dim = 256, 8
    key = 0.1 * torch.randn(1, total, 1, dim)
    key[0, 7, 0] = torch.eye(dim)[0]
    query = 0.1 * torch.randn(1, total, 1, dim)
    query[0, 192:, 0, 0] = -1.0
    query[0, 200:204, 0, 0] = 2.0
    causal = Modifier(make("le", KV, Q)).serialized
    empty = torch.empty(1, total, 0)
    arguments = (query, key, empty, empty, torch.eye(dim), torch.eye(dim), causal, [], [], 64, 80, 1, 4, "none")
    chosen = reference.block_select(*arguments)
    assert 7 in chosen[0, 3]
    query[0, 200:204, 0, 0] = -1.0
    assert 7 not in reference.block_select(*arguments)[0, 3]
