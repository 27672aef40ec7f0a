"""The Triton kernels of a decode step, without a GPU: encode, score, select, attend, and generated functions.

Against their reference meaning in Triton's interpreter, and compiled ahead of time for GPUs that are not here. Triton
decides when a kernel is *defined* whether it will be interpreted, so the first half runs in a process of its own.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version

pytest.importorskip("triton")

from kernel_tools import TARGETS, Compiled, compile_for, record

from sals_compile.bench import operator
from sals_compile.kernels import attend, decode, dispatch, encode, ops, reference, score, select
from sals_compile.kernels.index_expr import KV, SCORE, B, H, Modifier, Q, const, integer, load, make

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Triton 3.6's interpreter takes ``int()`` of one-element arrays, which NumPy 2.4 refuses.
BROKEN_INTERPRETER = Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4")

_CAUSAL = make("le", KV, make("add", Q, load(0)))
_WINDOW = make("gt", KV, make("sub", make("add", Q, load(0)), integer(0)))
_SOFTCAP = make("mul", const(5.0), make("tanh", make("div", SCORE, const(5.0))))

#: Tensor arguments: the position of the first query (0-d) and padding ``[B, S]``; integer argument: a window.
MODIFIERS = {
    "none": Modifier(),
    "causal": Modifier(_CAUSAL),
    "causal, padding": Modifier(make("and", _CAUSAL, load(1, B, KV))),
    "sliding window, softcap": Modifier(make("and", _CAUSAL, _WINDOW), _SOFTCAP),
    "a head sees half": Modifier(make("and", _CAUSAL, make("or", make("lt", H, const(1)), make("lt", KV, const(40))))),
    "alibi": Modifier(_CAUSAL, make("sub", SCORE, make("mul", const(0.03), make("sub", make("add", Q, load(0)), KV)))),
}

# (query heads, KV heads, D, rotated dims)
shapes = st.sampled_from(
    [(2, 2, 32, 32), (4, 2, 64, 64), (3, 1, 96, 96), (6, 2, 80, 32), (16, 1, 40, 16), (1, 1, 256, 64)]
)
rotaries = st.sampled_from(["half", "interleaved", "none"])
modifiers = st.sampled_from(sorted(MODIFIERS))


class Site:
    """A site's state after ``filled`` random tokens, written by the reference, and one call's inputs."""

    def __init__(
        self, batch: int, queries: int, shape: tuple[int, int, int, int], rank: int, rotary: str, positions: int,
        quantised: bool, bits: int, modifier: str, filled: int = 90, slots: int = 256, window: int = 24,
    ) -> None:  # fmt: skip
        heads, kv_heads, dim, rotary_dim = shape
        rotary_dim = 0 if rotary == "none" else rotary_dim
        positions = batch if positions > 1 else 1
        group = reference.value_group(dim, bits)
        self.rotary, self.dim = rotary, dim
        self.state = {
            "codes": torch.zeros(batch, slots, rank, dtype=torch.int8 if quantised else torch.float32),
            "scales": torch.zeros(batch, slots, dtype=torch.float16) if quantised else torch.empty(0),
            "value_codes": torch.zeros(batch, slots, kv_heads, dim * bits // 8 if bits < 16 else dim,
                                       dtype=torch.uint8 if bits < 16 else torch.float32),
            "value_scales": torch.zeros(batch, slots, kv_heads, dim // group, 2, dtype=torch.float16)
            if bits < 16 else torch.empty(0),
            "ring_key": torch.zeros(batch, window, kv_heads, dim),
            "ring_value": torch.zeros(batch, window, kv_heads, dim),
        }  # fmt: skip
        self.rows = {
            "cos": torch.zeros(positions, slots, rotary_dim),
            "sin": torch.zeros(positions, slots, rotary_dim),
            "block_cos": torch.zeros(positions, slots // reference.BLOCK, rotary_dim),
            "block_sin": torch.zeros(positions, slots // reference.BLOCK, rotary_dim),
            "ring_slots": torch.full((positions, window), -1, dtype=torch.int32),
        }
        joint = kv_heads * dim
        self.weights = {
            "encoder": torch.randn(joint, rank) / math.sqrt(joint),
            "value_transform": reference.hadamard(dim),
        }
        self.decoder = torch.randn(rank, joint) / math.sqrt(rank)
        self.past = self.inputs(batch, filled, 0, kv_heads, dim, rotary_dim, positions)
        self.now = self.inputs(batch, queries, filled, kv_heads, dim, rotary_dim, positions)
        self.write(reference, self.past)
        # Laid out [B, H, L, D] underneath, as most models leave it.
        self.query = torch.randn(batch, heads, queries, dim).transpose(1, 2)
        padding = torch.rand(batch, slots) < 0.8
        self.modifier = (MODIFIERS[modifier].serialized, [torch.tensor(filled), padding], [50])

    def inputs(
        self, batch: int, tokens: int, first: int, kv_heads: int, dim: int, rotary_dim: int, positions: int
    ) -> Any:
        angles = 6 * torch.rand(positions, tokens, rotary_dim)  # the dims of a pair may differ, in general
        return {
            "new_cos": angles.cos(),
            "new_sin": angles.sin(),
            "slots": (first + torch.arange(tokens)).expand(positions, -1),
            "key_pre": torch.randn(batch, tokens, kv_heads, dim),
            "key": torch.randn(batch, kv_heads, tokens, dim).transpose(1, 2),
            "value": torch.randn(batch, kv_heads, tokens, dim).transpose(1, 2),
        }

    def write(self, module: Any, new: dict[str, torch.Tensor]) -> None:
        """``record_rows`` and ``encode`` by the functions of ``module``."""
        new = dict(new)
        rows = {name: new.pop(name) for name in ("new_cos", "new_sin")}
        module.record_rows(**self.rows, **rows, slots=new["slots"])
        module.encode(**self.state, **new, **self.weights)

    def score_arguments(self, capacity: int, score_rank: int) -> tuple[Any, ...]:
        return (
            self.query, self.state["codes"], self.state["scales"], self.decoder, self.rows["block_cos"],
            self.rows["block_sin"], self.rows["ring_slots"], self.now["slots"], *self.modifier, capacity, score_rank, 3,
            self.rotary,
        )  # fmt: skip

    def attend_arguments(self, indices: torch.Tensor, sinks: torch.Tensor | None) -> tuple[Any, ...]:
        return (
            self.query, indices, *self.state.values(), self.rows["ring_slots"], self.rows["cos"], self.rows["sin"],
            self.decoder, self.weights["value_transform"], *self.modifier, self.dim**-0.5, self.rotary, sinks,
        )  # fmt: skip


sites = st.builds(
    Site, st.integers(1, 3), st.integers(1, 8), shapes, st.sampled_from([17, 32, 50, 100]), rotaries, st.integers(1, 2),
    st.booleans(), st.sampled_from([2, 4, 8, 16]), modifiers,
)  # fmt: skip


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

    @settings(max_examples=5)
    @given(sites)
    @example(Site(2, 3, (6, 2, 80, 32), 33, "half", 2, True, 4, "none"))
    @example(Site(1, 40, (2, 2, 32, 32), 16, "interleaved", 1, True, 8, "none"))  # more tokens than the ring holds
    @example(Site(1, 7, (4, 2, 64, 64), 32, "half", 1, True, 2, "none"))
    @example(Site(2, 3, (3, 1, 96, 96), 32, "half", 1, True, 2, "none"))  # parts of a byte begin within a group
    def test_record_rows_and_encode(self, site: Site) -> None:
        before = {name: tensor.clone() for name, tensor in (site.state | site.rows).items()}
        site.write(reference, site.now)
        expected = {name: tensor.clone() for name, tensor in (site.state | site.rows).items()}
        for name, tensor in (site.state | site.rows).items():
            tensor.copy_(before[name])
        site.write(encode, site.now)
        for name, tensor in (site.state | site.rows).items():
            if tensor.dtype in (torch.int8, torch.uint8):
                # A code may round the other way where a sum differs in its last bit.
                assert (tensor != expected[name]).float().mean() < 1e-3, name
            else:
                torch.testing.assert_close(tensor, expected[name], rtol=2e-3, atol=1e-5, msg=name)

    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_values_in_which_there_is_little_to_quantise(self, bits: int) -> None:
        site = Site(1, 4, (2, 2, 32, 32), 16, "half", 1, True, bits, "none")
        site.weights["value_transform"] = torch.eye(32)
        value = torch.zeros(1, 4, 2, 32)
        value[:, 1] = torch.tensor([-700.0, 1e-3])[:, None]
        value[:, 2, :, ::2] = 1.0
        value[:, 3, :, 5] = 100.0
        new = {name: tensor for name, tensor in site.now.items() if name not in ("new_cos", "new_sin")}
        found = {name: tensor.clone() for name, tensor in site.state.items()}
        reference.encode(**site.state, **new | {"value": value}, **site.weights)
        encode.encode(**found, **new | {"value": value}, **site.weights)
        for name in ("value_codes", "value_scales"):
            assert torch.equal(found[name], site.state[name]), name

    @settings(max_examples=6)
    @given(sites, st.integers(60, 256), st.booleans())
    @example(Site(2, 2, (4, 2, 64, 64), 100, "half", 1, True, 4, "a head sees half"), 256, False)
    @example(Site(1, 1, (3, 1, 96, 96), 50, "interleaved", 1, True, 4, "sliding window, softcap"), 200, True)
    def test_score(self, site: Site, capacity: int, whole: bool) -> None:
        rank = site.decoder.shape[0]
        arguments = site.score_arguments(capacity, rank if whole else min(rank, 32))
        expected, found = reference.score(*arguments), score.score(*arguments)
        finite = torch.isfinite(expected)
        assert torch.equal(torch.where(finite, 0, found), torch.where(finite, 0, expected))
        error = (found - expected)[finite].abs().amax() if finite.any() else torch.zeros(())
        assert error <= 1e-4 * expected[finite].abs().amax().clamp_min(1e-6) if finite.any() else True
        # The fused form selects from the very same scores.
        for k in (7, 40, 300):
            assert torch.equal(select.score_select(*arguments, k), reference.select(found, k))

    @settings(max_examples=6)
    @given(sites, st.integers(60, 256), st.booleans(), st.sampled_from(["mass", "max"]))
    @example(Site(2, 2, (4, 2, 64, 64), 100, "half", 1, True, 4, "a head sees half"), 256, False, "mass")
    @example(Site(1, 1, (3, 1, 96, 96), 50, "interleaved", 1, True, 4, "sliding window, softcap"), 200, True, "mass")
    @example(Site(1, 2, (3, 1, 96, 32), 50, "half", 1, True, 4, "causal"), 200, False, "max")
    def test_score_by_head(self, site: Site, capacity: int, whole: bool, head_score: str) -> None:
        rank = site.decoder.shape[0]
        arguments = site.score_arguments(capacity, rank if whole else min(rank, 32))
        by_head = (head_score, site.dim**-0.5)
        expected, found = reference.score(*arguments, *by_head), score.score(*arguments, *by_head)
        finite = torch.isfinite(expected)
        assert torch.equal(torch.where(finite, 0, found), torch.where(finite, 0, expected))
        if finite.any():
            assert (found - expected)[finite].abs().amax() <= 1e-4 * expected[finite].abs().amax().clamp_min(1e-6)
        for k in (7, 300):
            assert torch.equal(select.score_select(*arguments, k, *by_head), reference.select(found, k))

    @settings(max_examples=8)
    @given(sites, st.integers(1, 70), st.booleans(), st.booleans())
    @example(Site(2, 1, (4, 2, 64, 64), 32, "half", 1, True, 4, "causal"), 33, True, True)
    @example(Site(1, 1, (2, 2, 32, 32), 32, "interleaved", 1, True, 4, "alibi"), 64, False, True)
    @example(Site(1, 2, (16, 1, 40, 16), 17, "half", 1, False, 16, "causal, padding"), 20, True, False)
    @example(Site(2, 1, (4, 2, 64, 64), 32, "half", 1, True, 2, "causal"), 33, False, True)
    @example(Site(1, 1, (2, 1, 128, 128), 32, "half", 1, True, 2, "none"), 40, True, True)  # a group is a part
    @example(Site(1, 2, (6, 2, 80, 32), 32, "interleaved", 1, True, 2, "causal"), 30, False, False)
    def test_attend(self, site: Site, count: int, sinks: bool, int8: bool) -> None:
        batch, queries, heads, _ = site.query.shape
        chosen = torch.rand(batch, queries, 66).argsort(-1)[..., :count].sort(-1).values.to(torch.int32)
        indices = torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=-1)
        indices[..., count - count // 4 :] = -1
        arguments = site.attend_arguments(indices, torch.randn(heads) if sinks else None)
        if int8:
            rotary_dim = site.rows["cos"].shape[-1]
            arguments += reference.quantize_decoder(site.decoder, site.dim, rotary_dim, site.rotary)
        if not site.state["scales"].numel():
            arguments = arguments[:19]
        expected, found = reference.attend(*arguments), attend.attend(*arguments)
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
        assert torch.equal(attend.attend(*arguments), found)

    @pytest.mark.parametrize("tiles", [(32, 2, 32, 1, 16, 4), (16, 1, 64, 2, 32, 4)], ids=str)
    def test_attend_in_other_tiles(self, tiles: tuple[int, ...]) -> None:
        site = Site(2, 1, (4, 2, 32, 16), 50, "half", 1, True, 4, "causal")
        arguments = site.attend_arguments(torch.arange(0, 66, 2, dtype=torch.int32).expand(2, 1, -1), None)
        arguments += reference.quantize_decoder(site.decoder, 32, 16, "half")
        expected = reference.attend(*arguments)
        found = attend.attend(*arguments, tiles=attend.Tiles(*tiles))
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)

    @settings(max_examples=3)
    @given(sites, st.integers(1, 50), st.sampled_from(["sum", "max", "mass"]))
    @example(Site(2, 1, (4, 2, 64, 64), 50, "half", 2, True, 4, "causal"), 40, "sum")
    @example(Site(2, 2, (4, 2, 64, 64), 50, "half", 2, True, 2, "causal"), 40, "mass")
    @example(Site(1, 8, (2, 2, 32, 32), 32, "half", 1, True, 4, "alibi", filled=125), 40, "mass")  # across two tiles
    @example(Site(1, 30, (2, 2, 32, 32), 16, "interleaved", 1, True, 8, "none"), 20, "mass")  # more than the ring holds
    def test_decode_is_its_parts(self, site: Site, k: int, head_score: str) -> None:
        new = {name: tensor for name, tensor in site.now.items() if name not in ("new_cos", "new_sin")}
        before = {name: tensor.clone() for name, tensor in site.state.items()}
        rank = site.decoder.shape[0]
        encode.record_rows(**site.rows, **{name: site.now[name] for name in ("new_cos", "new_sin", "slots")})
        encode.encode(**site.state, **new, **site.weights)
        chosen = select.score_select(*site.score_arguments(256, rank), k, head_score, site.dim**-0.5)
        expected = attend.attend(*site.attend_arguments(chosen, None))
        after = {name: tensor.clone() for name, tensor in site.state.items()}
        for name, tensor in site.state.items():
            tensor.copy_(before[name])
        rows = site.rows
        found = decode.decode(
            *site.state.values(), site.query, new["key_pre"], new["key"], new["value"], site.weights["encoder"],
            site.decoder, site.weights["value_transform"], new["slots"], rows["ring_slots"], rows["cos"], rows["sin"],
            rows["block_cos"], rows["block_sin"], *site.modifier, 256, rank, 3, site.rotary, k, site.dim**-0.5,
            head_score,
        )  # fmt: skip
        assert torch.equal(found, expected)
        for name, tensor in site.state.items():
            assert torch.equal(tensor, after[name]), name

    def test_nothing_to_attend_gives_zeros(self) -> None:
        site = Site(1, 1, (4, 2, 64, 64), 32, "half", 1, True, 4, "none")
        site.rows["ring_slots"].fill_(-1)
        found = attend.attend(*site.attend_arguments(torch.full((1, 1, 5), -1, dtype=torch.int32), None))
        assert torch.equal(found, torch.zeros_like(found))

    @settings(max_examples=6)
    @given(st.integers(1, 700), st.integers(1, 60), st.integers(0, 2**31), st.integers(1, 5))
    @example(600, 600, 1, 1)
    @example(600, 700, 2, 1)
    def test_select(self, total: int, k: int, seed: int, levels: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(8, total, generator=generator)
        scores[1] = torch.randint(0, levels, (total,), generator=generator).float()  # ties
        scores[2, torch.rand(total, generator=generator) < 0.5] = -math.inf
        scores[3] = -math.inf
        scores[4, ::3] = math.nan
        scores[5, ::2] = math.inf
        scores[6] = torch.where(torch.rand(total, generator=generator) < 0.5, 0.0, -0.0)
        scores[7] *= 1e-42  # subnormal, of both signs
        assert torch.equal(select.select(scores, k), reference.select(scores, k))

    def test_select_streams_rows_whose_ties_do_not_fit(self) -> None:
        scores = torch.zeros(2, 5000)
        scores[1, 77::2] = 1.0
        scores[1, 4000] = 2.0
        assert torch.equal(select.select(scores, 100), reference.select(scores, 100))

    def test_a_state_that_is_not_contiguous_is_refused(self) -> None:
        site = Site(1, 1, (2, 2, 32, 32), 16, "half", 1, True, 4, "none")
        site.state["ring_key"] = site.state["ring_key"].transpose(1, 2)
        with pytest.raises(ValueError, match="contiguous ring_key"):
            site.write(encode, site.now)

    def test_generated_functions(self) -> None:
        from codegen_probe import check

        check()


# ---- compiled for GPUs that are not here -----------------------------------------------------------------------------


def _layer(kv_heads: int, groups: int, rank: int, batch: int, bits: int) -> Site:
    shape = (kv_heads * groups, kv_heads, 128, 128)
    return Site(batch, 1, shape, rank, "half", 1, True, bits, "sliding window, softcap", 140, 1024, 128)


def _bf16(tensor: Any) -> Any:
    return tensor.bfloat16() if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 else tensor


def _launchers() -> dict[str, Any]:
    """Every kernel once or twice, as a bf16 model of many heads launches it."""
    gqa, mha, compact = _layer(2, 4, 128, 2, 4), _layer(4, 1, 256, 2, 4), _layer(2, 4, 64, 2, 2)

    def attended(site: Site) -> list[Any]:
        indices = torch.zeros(2, 1, 384, dtype=torch.int32)
        return [_bf16(a) for a in site.attend_arguments(indices, None)]

    def scored(site: Site) -> list[Any]:
        arguments = [_bf16(a) for a in site.score_arguments(1000, 64)]
        arguments[4:6] = site.rows["block_cos"], site.rows["block_sin"]
        return arguments

    def encoded(site: Site) -> dict[str, Any]:
        new = {name: _bf16(tensor) for name, tensor in site.now.items() if name not in ("new_cos", "new_sin")}
        state = {name: _bf16(tensor) for name, tensor in site.state.items()}
        return state | new | site.weights | {"encoder": site.weights["encoder"].bfloat16()}

    def step(site: Site) -> list[Any]:
        new, rows = encoded(site), site.rows
        return [
            *(new[name] for name in site.state), scored(site)[0], new["key_pre"], new["key"], new["value"],
            new["encoder"], site.decoder.bfloat16(), new["value_transform"], new["slots"], rows["ring_slots"],
            rows["cos"].bfloat16(), rows["sin"].bfloat16(), rows["block_cos"], rows["block_sin"],
            *site.modifier, 1000, 64, 4, "half", 384, 0.1,
        ]  # fmt: skip

    rows = {name: gqa.now[name] for name in ("new_cos", "new_sin", "slots")}
    quantised = reference.quantize_decoder(mha.decoder, 128, 128, "half")
    return {
        "decode, 2-bit values": lambda: decode.decode(*step(compact)),
        "decode, mass": lambda: decode.decode(*step(gqa), "mass"),
        "record_rows": lambda: encode.record_rows(**gqa.rows, **rows),
        "encode": lambda: encode.encode(**encoded(gqa)),
        "encode, 2-bit values": lambda: encode.encode(**encoded(compact)),
        "score_select": lambda: select.score_select(*scored(gqa), 384),
        "score_select, mass": lambda: select.score_select(*scored(gqa), 384, "mass", 0.1),
        "score_select, max": lambda: select.score_select(*scored(gqa), 384, "max", 0.1),
        "select": lambda: select.select(torch.zeros(2, 32768), 384),
        "attend, groups of 4, bf16": lambda: attend.attend(*attended(gqa)),
        "attend, one head each, int8": lambda: attend.attend(*attended(mha), *quantised),
    }


@pytest.mark.skipif(INTERPRETED, reason="compiles, not interprets")
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t[0]}-{t[1]}")
def test_kernels_compile_ahead_of_time(target: tuple[str, int | str, int], record_property: Any) -> None:
    compiled: dict[str, Compiled] = {}
    for name, launcher in _launchers().items():
        for launch in record(launcher):
            result = compile_for(launch, *target)
            compiled[f"{name}: {result.kernel}"] = result
            # 64 KiB is what gfx942 has; the others have more.
            assert result.shared <= (65536 if target[0] == "hip" else 101376), result
    for name, result in compiled.items():
        record_property(name, f"{result.registers} registers, {result.shared} bytes shared, {result.spills} spilled")
    kernels = {result.kernel for result in compiled.values()}
    assert kernels >= {
        "_begin_kernel",
        "_begin_by_head_kernel",
        "_encode_kernel",
        "_score_kernel",
        "_mass_kernel",
        "_select_kernel",
        "_attend_kernel",
    }


@pytest.mark.skipif(INTERPRETED, reason="not about kernels")
def test_every_operator_of_the_table_exists_and_can_be_launched() -> None:
    assert set(dispatch.TRITON) <= set(ops.SCHEMAS)
    for name in ("record_rows", "encode", "score", "select", "score_select", "attend", "decode"):
        assert callable(dispatch.launcher(name))


@pytest.mark.skipif(INTERPRETED, reason="not about kernels")
def test_bench_operator_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("has one")
    assert operator.run(["--sizes", "16x4k"]) == 2
    assert "this machine has none" in capsys.readouterr().err


@pytest.mark.skipif(INTERPRETED, reason="not about kernels")
def test_bench_operator_floors() -> None:
    floors = operator.floors(operator.PRESETS["gqa"], 8, 32768, 384, int8=False)
    assert floors["score"]["bytes"] == pytest.approx(8 * 32768 * (128 + 6) + 2 * 1024 * 128)
    assert floors["attend"]["us"] == pytest.approx(
        2 * 8 * 384 * operator.PRESETS["gqa"].rank * 1024 / operator.RATES["bf16"] * 1e6
    )
    assert floors["total"]["us"] < sum(floors[s]["us"] for s in ("encode", "score", "select", "attend"))
