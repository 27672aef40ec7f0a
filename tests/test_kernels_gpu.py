"""The decode kernels on a GPU, in the dtypes of real models, against the reference meaning in fp64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from sals_compile.bench import operator
from sals_compile.kernels import attend, dispatch, encode, reference, select

pytestmark = pytest.mark.gpu

WITH_GROUPS = operator.Preset("groups", 16, 4, 128, 256, 128)
ONE_HEAD_EACH = operator.Preset("one head each", 8, 8, 128, 512, 256)
presets = pytest.mark.parametrize("preset", [WITH_GROUPS, ONE_HEAD_EACH], ids=lambda p: p.name)
scores = pytest.mark.parametrize("head_score", ["sum", "mass", "max"])
widths = pytest.mark.parametrize("bits", [2, 4, 8])


def in_double() -> Any:
    """The reference computes in fp64: everything it does starts with ``.float()``."""
    return mock.patch.object(torch.Tensor, "float", torch.Tensor.double)


def layer(preset: operator.Preset, batch: int = 2, tokens: int = 1024, bits: int = 4) -> operator.Layer:
    device = torch.device("cuda")
    rows = operator.shared_rows(tokens, preset.head_dim, device, torch.bfloat16)
    site = operator.make_layer(preset, batch, tokens, rows, torch.Generator(device).manual_seed(1))
    values = reference.dequantize_values(site.state["value_codes"], site.state["value_scales"], preset.head_dim)
    site.state["value_codes"], site.state["value_scales"] = reference.quantize_values(values, bits)
    return site


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).double().norm() / expected.double().norm())


def attend_arguments(site: operator.Layer, indices: torch.Tensor, int8: bool) -> tuple[Any, ...]:
    decoder = (site.decoder_codes, site.decoder_scales) if int8 else (None, None)
    return (
        site.query, indices, *site.state.values(), site.rows["ring_slots"], site.rows["cos"], site.rows["sin"],
        site.decoder, site.transform, operator.CAUSAL, [site.position], [], site.preset.head_dim**-0.5, "half", None,
        *decoder,
    )  # fmt: skip


@presets
@widths
def test_encode(preset: operator.Preset, bits: int) -> None:
    site = layer(preset, bits=bits)
    expected = {name: tensor.clone() for name, tensor in site.state.items()}
    new = {
        "key_pre": site.key_pre, "key": site.key, "value": site.value, "encoder": site.encoder,
        "value_transform": site.transform, "slots": site.slots,
    }  # fmt: skip
    with in_double():
        reference.encode(**expected, **new)
    encode.encode(**site.state, **new)
    for name, tensor in site.state.items():
        if tensor.dtype in (torch.int8, torch.uint8):
            # The last token's codes, few of which may round the other way.
            assert (tensor != expected[name]).sum() <= 1 + 0.01 * tensor[:, -1].numel(), name
        elif name == "value_scales" and bits == 2:
            # Where a first guess of a code rounds the other way, four levels are fitted to other codes.
            same = torch.isclose(tensor[:, -1], expected[name][:, -1], rtol=2e-3, atol=4e-3)
            assert same.float().mean() > 0.95
        else:
            torch.testing.assert_close(tensor, expected[name], rtol=2e-3, atol=4e-3, msg=name)
    exact = site.value[:, -1].double() @ site.transform.double()
    errors = []
    for state in (site.state, expected):
        codes, scales = (state[name][:, -1] for name in ("value_codes", "value_scales"))
        errors.append(relative(reference.dequantize_values(codes, scales, preset.head_dim), exact))
    assert errors[0] < 1.01 * errors[1]


@presets
@scores
def test_score_and_select(preset: operator.Preset, head_score: str) -> None:
    site = layer(preset)
    site.head_score = head_score
    found = site.score()
    with in_double():
        expected = reference.score(*site._score_arguments(), *site._by_head())
    finite = torch.isfinite(expected)
    assert torch.equal(torch.where(finite, 0, found.double()), torch.where(finite, 0, expected.double()))
    assert relative(found[finite], expected[finite]) < 1e-2
    chosen = site.score_select()
    assert torch.equal(chosen, reference.select(found, site.selected))
    assert torch.equal(chosen, site.score_select())


@presets
@widths
@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_attend(preset: operator.Preset, int8: bool, bits: int) -> None:
    site = layer(preset, bits=bits)
    arguments = attend_arguments(site, site.score_select(), int8)
    found = attend.attend(*arguments)
    with in_double():
        expected = reference.attend(*arguments)
    assert relative(found, expected) < 1e-2
    assert torch.equal(found, attend.attend(*arguments))


@presets
@scores
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_decode_is_its_parts(preset: operator.Preset, int8: bool, head_score: str, bits: int) -> None:
    site, other = layer(preset, bits=bits), layer(preset, bits=bits)
    for one in (site, other):
        one.int8, one.head_score = int8, head_score
    found = site.step()
    assert torch.equal(found, other.separate_steps())
    for name, tensor in site.state.items():
        assert torch.equal(tensor, other.state[name]), name
    assert torch.equal(found, site.step())


def test_select_is_exact_on_any_row() -> None:
    scores = torch.randn(5, 32768, device="cuda")
    scores[1] = 0
    scores[2, 100:] = -torch.inf
    scores[3] = scores[3].round()
    scores[4, ::7] = torch.nan
    for k in (1, 384, 512, 2048):
        assert torch.equal(select.select(scores, k), reference.select(scores, k))


def test_a_step_replays_in_a_cuda_graph() -> None:
    site = layer(WITH_GROUPS)
    expected = site.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = site.step()
    site.query.copy_(site.query.flip(0))
    expected_flipped = site.step()
    site.query.copy_(site.query.flip(0))
    graph.replay()
    assert torch.equal(found, expected)
    site.query.copy_(site.query.flip(0))
    graph.replay()
    assert torch.equal(found, expected_flipped)


def test_operators_reach_the_kernels() -> None:
    launched: list[str] = []
    original = dispatch.launcher

    def launcher(name: str) -> Any:
        launched.append(name)
        return original(name)

    with mock.patch.object(dispatch, "launcher", launcher):
        layer(WITH_GROUPS).step()
        layer(WITH_GROUPS).separate_steps()
    assert {"decode", "encode", "score_select", "attend"} <= set(launched)
