"""The Triton kernels of dense, stateless and fully rebuilt attention, without a GPU.

Against their reference meaning in Triton's interpreter, and compiled ahead of time for GPUs that are not here. Triton
decides when a kernel is *defined* whether it will be interpreted, so the first half runs in a process of its own.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version

pytest.importorskip("triton")

from kernel_tools import TARGETS, compile_for, record

from sals_compile.bench import modules
from sals_compile.kernels import block_sparse, dense, dispatch, prefill, reference
from sals_compile.kernels.index_expr import KV, SCORE, H, Modifier, Q, const, integer, load, make

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Triton 3.6's interpreter takes ``int()`` of one-element arrays, which NumPy 2.4 refuses.
BROKEN_INTERPRETER = Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4")

_CAUSAL = make("le", KV, make("add", Q, integer(0)))
_WINDOW = make("gt", KV, make("sub", make("add", Q, integer(0)), const(19)))
_LOADED = make("le", KV, make("add", Q, load(0)))
_DOCUMENT = make("or", make("eq", make("mod", KV, const(3)), make("mod", Q, const(3))), make("lt", H, const(1)))
_SOFTCAP = make("mul", make("tanh", make("div", SCORE, const(5.0))), const(5.0))

#: Each with one tensor argument (a 0-d position) and one integer: both the position of the first query.
MODIFIERS = {
    "none": Modifier().serialized,
    "causal": Modifier(_CAUSAL).serialized,
    "causal, position on the device": Modifier(_LOADED).serialized,
    "sliding window": Modifier(make("and", _CAUSAL, _WINDOW)).serialized,
    "documents, one head free": Modifier(_DOCUMENT).serialized,
    "softcap": Modifier(_CAUSAL, _SOFTCAP).serialized,
    "nothing allowed": Modifier(make("lt", KV, const(0))).serialized,
}

heads = st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 3), (4, 2), (16, 1)])  # query heads, KV heads
widths = st.sampled_from([32, 40, 64, 96, 128, 256])
modifiers = st.sampled_from(sorted(MODIFIERS))
rotaries = st.sampled_from(["none", "half", "interleaved"])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def rotary_rows(positions: int, tokens: int, rotary_dim: int, rotary: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin rows ``[P,S,Dr]`` of random angles; the dims of a pair differ in amplitude, as a general row may."""
    if rotary == "none":
        return torch.empty(positions, tokens, 0), torch.empty(positions, tokens, 0)
    angles = torch.rand(positions, tokens, rotary_dim // 2) * 6
    angles = torch.cat((angles, angles), -1) if rotary == "half" else angles.repeat_interleave(2, -1)
    amplitude = 1 + 0.2 * torch.rand(rotary_dim)
    return angles.cos() * amplitude, angles.sin() * amplitude


def storage(
    batch: int, slots: int, filled: int, kv_heads: int, dim: int, rotary: str, positions: int, window: int, rank: int,
    quantised: bool, value_bits: int, rotary_dim: int,
) -> list[torch.Tensor]:  # fmt: skip
    """A site's state after ``filled`` tokens, in the order that ``materialize`` takes it, decoder, transform last."""
    new_cos, new_sin = rotary_rows(positions, filled, rotary_dim, rotary)
    width = new_cos.shape[-1]
    cos, sin = torch.zeros(positions, slots, width), torch.zeros(positions, slots, width)
    means = [torch.zeros(positions, slots // reference.BLOCK, width) for _ in range(2)]
    ring_slots = torch.full((positions, window), -1, dtype=torch.int32)
    at = torch.arange(filled).expand(positions, -1)
    reference.record_rows(cos, sin, *means, ring_slots, new_cos, new_sin, at)
    group = reference.value_group(dim, value_bits)
    codes = torch.zeros(batch, slots, rank, dtype=torch.int8 if quantised else torch.float32)
    scales = torch.zeros(batch, slots, dtype=torch.float16) if quantised else torch.empty(0)
    if value_bits == 16:
        value_codes, value_scales = torch.zeros(batch, slots, kv_heads, dim), torch.empty(0)
    else:
        value_codes = torch.zeros(batch, slots, kv_heads, dim * value_bits // 8, dtype=torch.uint8)
        value_scales = torch.zeros(batch, slots, kv_heads, dim // group, 2, dtype=torch.float16)
    ring_key, ring_value = (torch.zeros(batch, window, kv_heads, dim) for _ in range(2))
    key_pre, value = torch.randn(2, batch, filled, kv_heads, dim)
    key = reference.apply_rotary(key_pre, new_cos.unsqueeze(2), new_sin.unsqueeze(2), rotary)
    encoder = torch.linalg.qr(torch.randn(kv_heads * dim, rank)).Q
    transform = reference.hadamard(dim)
    stored = (codes, scales, value_codes, value_scales, ring_key, ring_value)
    reference.encode(*stored, key_pre, key, value, encoder, transform, at)
    return [*stored, ring_slots, cos, sin, encoder.T.contiguous(), transform]


@pytest.mark.skipif(INTERPRETED, reason="is that process")
@pytest.mark.skipif(BROKEN_INTERPRETER, reason="Triton 3.6's interpreter needs NumPy < 2.4")
def test_against_the_reference_in_the_interpreter() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=os.path.dirname(__file__))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


class TestInterpreted:
    """Collected only in the process that interprets."""

    __test__ = INTERPRETED

    @settings(max_examples=10)
    @given(
        st.integers(1, 2), st.integers(1, 50), st.integers(0, 90), heads, widths, widths, modifiers, st.booleans(),
        st.booleans(),
    )  # fmt: skip
    @example(2, 1, 299, (16, 1), 64, 64, "causal, position on the device", False, False)
    @example(1, 70, 70, (4, 2), 32, 32, "sliding window", True, True)
    @example(1, 3, 0, (2, 1), 32, 32, "documents, one head free", False, True)
    def test_dense_attention(
        self, batch: int, queries: int, past: int, shape: tuple[int, int], dim: int, value_dim: int, modifier: str,
        sinks: bool, head_major: bool,
    ) -> None:  # fmt: skip
        query = torch.randn(batch, queries, shape[0], dim)
        layout = (batch, shape[1], past + queries) if head_major else (batch, past + queries, shape[1])
        key, value = torch.randn(*layout, dim), torch.randn(*layout, value_dim)
        if head_major:
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        arguments = (query, key, value, MODIFIERS[modifier], [torch.tensor(past)], [past], 0.2)
        sink_logits = torch.randn(shape[0]) if sinks else None
        close(dense.dense_attention(*arguments, sink_logits), reference.dense_attention(*arguments, sink_logits))

    def test_dense_attention_with_a_negative_scale_and_no_keys(self) -> None:
        query, key = torch.randn(1, 2, 2, 32), torch.randn(1, 9, 1, 32)
        arguments = (MODIFIERS["none"], [], [], -0.3)
        close(
            dense.dense_attention(query, key, key, *arguments), reference.dense_attention(query, key, key, *arguments)
        )
        nothing = dense.dense_attention(query, key[:, :0], key[:, :0], *arguments)
        assert nothing.shape == query.shape and not nothing.any()

    @pytest.mark.parametrize("block_m,splits", [(16, 3), (64, 2), (128, 1)])
    def test_dense_attention_in_other_tilings(self, block_m: int, splits: int) -> None:
        query, key, value = torch.randn(1, 40, 4, 32), torch.randn(1, 110, 2, 32), torch.randn(1, 110, 2, 48)
        tiles = dense.Tiling(block_m, 32, splits, 4, 2)
        for name in ("causal, position on the device", "sliding window", "softcap"):
            arguments = (query, key, value, MODIFIERS[name], [torch.tensor(70)], [70], 0.2, torch.randn(4))
            close(dense._launch(*arguments, tiles), reference.dense_attention(*arguments))

    @settings(max_examples=10)
    @given(
        st.integers(1, 2), st.integers(1, 100), st.integers(0, 150), heads, st.sampled_from([32, 40, 64, 96]),
        modifiers, rotaries, st.booleans(), st.booleans(), st.sampled_from([16, 24, 64]), st.integers(1, 90),
        st.integers(1, 70),
    )  # fmt: skip
    @example(2, 140, 0, (4, 2), 64, "causal", "half", False, False, 64, 40, 64)
    @example(2, 140, 0, (4, 2), 64, "sliding window", "half", True, True, 64, 200, 64)
    def test_block_select(
        self, batch: int, queries: int, past: int, shape: tuple[int, int], dim: int, modifier: str, rotary: str,
        partial: bool, own_positions: bool, query_block: int, k: int, rank: int,
    ) -> None:  # fmt: skip
        keys, kv_heads = past + queries, shape[1]
        rows = rotary_rows(batch if own_positions else 1, keys, dim // 2 if partial else dim, rotary)
        key_pre = torch.randn(batch, keys, kv_heads, dim)
        encoder, decoder = torch.randn(kv_heads * dim, rank), torch.randn(rank, kv_heads * dim)
        query = torch.randn(batch, queries, shape[0], dim)
        arguments = (
            query, key_pre, *rows, encoder, decoder, MODIFIERS[modifier], [torch.tensor(past)], [past], query_block, k,
            3, 5, rotary,
        )  # fmt: skip
        found = block_sparse.block_select(*arguments)
        expected = reference.block_select(*arguments)
        # Sums in another order can swap two tokens whose scores are all but equal.
        assert (found != expected).float().mean() < 0.02

    def test_block_select_in_chunks_is_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        query, key_pre = torch.randn(2, 100, 4, 32), torch.randn(2, 100, 2, 32)
        rows = rotary_rows(1, 100, 32, "half")
        basis = torch.randn(64, 20)
        arguments = (
            query, key_pre, *rows, basis, basis.T.contiguous(), MODIFIERS["causal"], [torch.tensor(0)], [0], 16, 30, 2,
            4, "half",
        )  # fmt: skip
        whole = block_sparse.block_select(*arguments)
        monkeypatch.setattr(block_sparse, "WORKSPACE", 30_000)
        assert torch.equal(block_sparse.block_select(*arguments), whole)

    @pytest.mark.parametrize("total,k", [(1000, 100), (4096, 4096), (50, 80), (333, 17)])
    def test_select_rows(self, total: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(block_sparse, "ROWS_IN_REGISTERS", 1)
        scores = torch.randn(6, total)
        scores[1] = scores[1].round()
        scores[2] = 2.0
        scores[3] = -torch.inf
        scores[4, ::3] = torch.inf
        scores[5, ::5], scores[5, 1::7], scores[5, 2::9], scores[5, 3::9] = torch.nan, -torch.inf, 0.0, -0.0
        found = torch.empty(6, k, dtype=torch.int32)
        block_sparse.select_rows(scores, k, found)
        assert torch.equal(found, reference.select(scores, k))

    @settings(max_examples=10)
    @given(
        st.integers(1, 2), st.integers(1, 80), st.integers(0, 100), heads, widths, widths, modifiers, st.booleans(),
        st.sampled_from([16, 24, 64]), st.integers(1, 150),
    )  # fmt: skip
    @example(1, 100, 0, (4, 2), 64, 64, "causal", True, 16, 150)
    def test_block_attend(
        self, batch: int, queries: int, past: int, shape: tuple[int, int], dim: int, value_dim: int, modifier: str,
        sinks: bool, query_block: int, k: int,
    ) -> None:  # fmt: skip
        keys = past + queries
        query, key = torch.randn(batch, queries, shape[0], dim), torch.randn(batch, keys, shape[1], dim)
        value = torch.randn(batch, keys, shape[1], value_dim)
        chosen = reference.select(torch.randn(batch, -(-queries // query_block), keys), k)
        sink_logits = torch.randn(shape[0]) if sinks else None
        arguments = (
            query, key, value, chosen, MODIFIERS[modifier], [torch.tensor(past)], [past], query_block, 0.2, sink_logits
        )  # fmt: skip
        close(block_sparse.block_attend(*arguments), reference.block_attend(*arguments))

    @settings(max_examples=10)
    @given(
        st.integers(1, 2), st.integers(1, 4), heads, widths, modifiers,
        rotaries, st.booleans(), st.booleans(), st.sampled_from([16, 32, 128]), st.integers(1, 40), st.booleans(),
        st.sampled_from([2, 4, 8, 16]), st.integers(5, 256), st.booleans(),
    )  # fmt: skip
    @example(2, 1, (4, 2), 128, "causal, position on the device", "half", False, False, 32, 64, True, 4, 200, False)
    @example(2, 2, (6, 3), 64, "sliding window", "interleaved", True, True, 32, 64, True, 4, 256, True)
    @example(2, 1, (4, 2), 128, "causal, position on the device", "half", False, False, 32, 64, True, 2, 200, False)
    @example(1, 2, (2, 1), 40, "none", "half", True, True, 32, 30, True, 2, 150, False)
    def test_materialize_and_reconstruct(
        self, batch: int, queries: int, shape: tuple[int, int], dim: int, modifier: str, rotary: str, partial: bool,
        own_positions: bool, window: int, rank: int, quantised: bool, value_bits: int, filled: int, sinks: bool,
    ) -> None:  # fmt: skip
        positions, rotary_dim = (batch if own_positions else 1), (dim // 2 if partial else dim)
        rank = min(rank, shape[1] * dim)
        state = storage(
            batch, 256, filled, shape[1], dim, rotary, positions, window, rank, quantised, value_bits, rotary_dim
        )
        capacity = min(256, filled + 7)
        found, expected = (f.materialize(*state, capacity, rotary) for f in (prefill, reference))
        close(found[0], expected[0])
        close(found[1], expected[1])
        query = torch.randn(batch, queries, shape[0], dim)
        past = filled - queries
        arguments = (
            query, *state, MODIFIERS[modifier], [torch.tensor(past)], [past], capacity, 0.2, rotary,
            torch.randn(shape[0]) if sinks else None,
        )  # fmt: skip
        close(prefill.reconstruct(*arguments), reference.reconstruct(*arguments))

    def test_reconstruct_for_many_queries_writes_the_tokens_out(self) -> None:
        state = storage(1, 256, 200, 2, 32, "half", 1, 32, 40, True, 4, 32)
        arguments = (torch.randn(1, 80, 4, 32), *state, MODIFIERS["causal"], [], [120], 200, 0.2, "half", None)
        close(prefill.reconstruct(*arguments), reference.reconstruct(*arguments))


def test_launchers_take_what_the_operators_pass() -> None:
    for name in ("dense_attention", "materialize", "reconstruct", "block_select", "block_attend"):
        expected = list(inspect.signature(getattr(reference, name)).parameters)
        assert list(inspect.signature(dispatch.launcher(name)).parameters)[: len(expected)] == expected, name


def test_bench_modules_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "modules.json"
    arguments = ["--device", "cpu", "--lengths", "256", "384", "--budget", "160", "--json", str(written)]
    assert modules.main(arguments) == 0
    assert "rebuilt/SALS" in capsys.readouterr().out
    rows = json.loads(written.read_text())["rows"]
    assert [(row["method"], row["tokens"]) for row in rows] == [
        ("SALS", 256), ("rebuilt", 256), ("SALS", 384), ("rebuilt", 384)
    ]  # fmt: skip
    for row in rows:
        assert set(row["modules"]) == set(modules.MODULES)
        assert (row["modules"]["TopK"] > 0) == (row["method"] == "SALS") and row["fused"] > 0
    with pytest.raises(SystemExit):
        modules.main(["--device", "cpu", "--lengths", "300"])


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.gpu
class TestOnGpu:
    """In bf16 against the reference meaning of the same bf16 inputs in fp32; and the same bits twice."""

    def check(self, operator: str, query: torch.Tensor, *arguments: Any) -> None:
        run = getattr(torch.ops.sals, operator)
        found = run(query, *arguments)
        expected = getattr(reference, operator)(query.float(), *arguments)
        assert relative_error(found, expected) < 1e-2
        assert torch.equal(found, run(query, *arguments))

    @pytest.mark.parametrize("modifier", sorted(set(MODIFIERS) - {"nothing allowed"}))
    @pytest.mark.parametrize("queries,keys,dim", [(1, 3000, 128), (3, 999, 64), (300, 300, 128), (200, 500, 96)])
    def test_dense_attention(self, modifier: str, queries: int, keys: int, dim: int) -> None:
        query = torch.randn(2, queries, 8, dim, device="cuda", dtype=torch.bfloat16)
        key, value = torch.randn(2, 2, keys, 2, dim, device="cuda", dtype=torch.bfloat16)
        past = keys - queries
        self.check(
            "dense_attention", query, key, value, MODIFIERS[modifier], [torch.tensor(past, device="cuda")], [past], 0.1
        )

    @pytest.mark.parametrize("modifier", ["causal", "sliding window", "documents, one head free", "none"])
    def test_block_sparse(self, modifier: str) -> None:
        tokens, dim = 1000, 128
        query = torch.randn(1, tokens, 8, dim, device="cuda", dtype=torch.bfloat16)
        key_pre, key, value = torch.randn(3, 1, tokens, 2, dim, device="cuda", dtype=torch.bfloat16)
        rows = [r.cuda() for r in rotary_rows(1, tokens, dim, "half")]
        basis = torch.linalg.qr(torch.randn(2 * dim, 64)).Q.cuda()
        shared = (MODIFIERS[modifier], [torch.tensor(0, device="cuda")], [0])
        arguments = (query, key_pre, *rows, basis, basis.T.contiguous(), *shared, 64, 200, 4, 64, "half")
        found, expected = torch.ops.sals.block_select(*arguments), reference.block_select(*arguments)
        same = [
            len(set(a.tolist()) & set(b.tolist())) / len(set(b.tolist()))
            for a, b in zip(found[0], expected[0], strict=True)
        ]
        assert sum(same) / len(same) > 0.98  # scores are rounded to bf16
        assert torch.equal(found, torch.ops.sals.block_select(*arguments))
        self.check("block_attend", query, key, value, found, *shared, 64, 0.1)

    @pytest.mark.parametrize("bits", [2, 4])
    @pytest.mark.parametrize("rotary", ["half", "interleaved", "none"])
    @pytest.mark.parametrize("queries,heads", [(1, 2), (1, 16), (40, 8)])
    def test_reconstruct(self, rotary: str, queries: int, heads: int, bits: int) -> None:
        state = [x.cuda() for x in storage(2, 1024, 900, 2, 128, rotary, 1, 128, 100, True, bits, 128)]
        state[4], state[5] = state[4].bfloat16(), state[5].bfloat16()
        query = torch.randn(2, queries, heads, 128, device="cuda", dtype=torch.bfloat16)
        self.check("reconstruct", query, *state, MODIFIERS["causal"], [], [900 - queries], 900, 0.1, rotary)


# ---- ahead of time ------------------------------------------------------------------------------------------------

#: Shared memory a program may use, by target.
SHARED = {80: 166912, 90: 232448, 100: 232448, "gfx942": 65536}
CAPABILITY = {80: 80, 90: 90, 100: 100, "gfx942": 0}


def launches(dim: int) -> list[Any]:
    """One launch of every kernel, in bf16, with the shapes of a model (group of 4)."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    kv_heads, rank, tokens = 2, 128, 1024
    query, cache = empty(1, tokens, 4 * kv_heads, dim), empty(1, tokens, kv_heads, dim)
    position, causal, loaded = (
        torch.tensor(tokens - 1),
        MODIFIERS["causal"],
        MODIFIERS["causal, position on the device"],
    )

    def state(bits: int) -> list[torch.Tensor]:
        groups = dim // reference.value_group(dim, bits)
        return [
            empty(1, tokens, rank, dtype=torch.int8), empty(1, tokens, dtype=torch.float16),
            empty(1, tokens, kv_heads, dim * bits // 8, dtype=torch.uint8),
            empty(1, tokens, kv_heads, groups, 2, dtype=torch.float16),
            empty(1, 128, kv_heads, dim), empty(1, 128, kv_heads, dim), empty(1, 128, dtype=torch.int32),
            empty(1, tokens, dim), empty(1, tokens, dim), empty(rank, kv_heads * dim),
            empty(dim, dim, dtype=torch.float32),
        ]  # fmt: skip

    chosen = empty(1, tokens // 64, 256, dtype=torch.int32)
    scores = empty(1, 128, 4096, dtype=torch.float32)

    def run() -> None:
        dense._launch(query[:, :1], cache, cache, loaded, [position], [], 0.1, None)
        dense._launch(query, cache, cache, loaded, [torch.tensor(0)], [], 0.1, None)
        block_sparse.block_attend(query, cache, cache, chosen, causal, [], [0], 64, 0.1)
        block_sparse.mean_queries(query, kv_heads, 64, torch.bfloat16)
        block_sparse.block_rows(empty(1, tokens, dim), empty(1, tokens, dim), tokens, dim, torch.bfloat16)
        projected, latent = empty(1, 128, 32, rank), empty(1, 4096, rank)
        block_sparse._score_chunk(projected, latent, scores, 0, causal, [], [0], 64, 8192, 8, 4, 128)
        block_sparse.select_rows(scores, 256, empty(1, 128, 256, dtype=torch.int32))
        for bits in (2, 4):
            prefill.materialize(*state(bits), tokens, "half")
            prefill.reconstruct(query[:, :1], *state(bits), loaded, [position], [], tokens, 0.1, "half")

    return record(run)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("backend,architecture,warp_size", TARGETS, ids=[str(t[1]) for t in TARGETS])
def test_compiles_ahead_of_time(
    backend: str, architecture: int | str, warp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (dense, block_sparse, prefill):
        monkeypatch.setattr(module, "capability", lambda device: CAPABILITY[architecture])
    # Head dim 128 where the kernels are tuned for it, 64 elsewhere: it compiles faster.
    seen = launches(128 if architecture == 90 else 64)
    assert {launch.kernel.__name__ for launch in seen} >= {
        "_dense_kernel", "_combine_kernel", "_block_attend_kernel", "_mean_query_kernel", "_block_rows_kernel",
        "_block_score_kernel", "_select_rows_kernel", "_materialize_kernel", "_reconstruct_kernel",
    }  # fmt: skip
    for launch in seen:
        compiled = compile_for(launch, backend, architecture, warp_size)
        print(compiled)
        assert compiled.shared <= SHARED[architecture], compiled
