"""`sals bench operator`: one sparse decode step of one site, stage by stage, against the best dense attention.

What is timed: CUDA-graph replays of the operators over several *layers* (each its own caches, weights and queries, so
that together they exceed the L2 cache and every read is cold), divided by the number of layers; the median over
replays. Dense baselines run in the same process on caches of the same length: cuDNN's and FlashAttention's
`scaled_dot_product_attention`, and FlexAttention's decode kernel, all without a mask, which is their best case.

Floors are what the stage must move or compute, over the rates that this machine reached when measured (see
:data:`RATES`).

After the table come the targets that the kernels are built to, each beside what this run measured: ratios of the best
dense kernel to the whole step, the selection alone, dense decode by our own kernel, whole-sequence attention with one
selection for each block of queries, growth with the context, and errors against the reference meaning in fp64.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..config import HEAD_SCORE, SalsConfig
from ..kernels import dispatch, reference
from ..kernels.index_expr import KV, Modifier, Q, load, make

#: Bytes a second of a large device copy (read plus written), bf16 FLOPs a second of a large product, int8 twice that;
#: measured on one H200 (torch 2.11, random data).
RATES = {"bytes": 4.3e12, "bf16": 788e12, "int8": 2 * 788e12}

#: What a replay reads must not still lie in the L2 cache: bytes that one pass over the layers touches, at least.
COLD_BYTES = 256e6

CAUSAL = Modifier(make("le", KV, make("add", Q, load(0)))).serialized
SINKS, WINDOW = 4, 128


@dataclass(frozen=True)
class Preset:
    """A model's attention geometry and the compression chosen for it."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    rank: int
    score_rank: int

    @staticmethod
    def of(heads: int, kv_heads: int, head_dim: int, config: SalsConfig) -> Preset:
        """Heads by a model's shape, ranks by a configuration."""
        ranks = config.resolve_rank(kv_heads * head_dim)
        return Preset(f"{heads}/{kv_heads}/{head_dim}", heads, kv_heads, head_dim, *ranks)

    @property
    def joint(self) -> int:
        return self.kv_heads * self.head_dim


PRESETS = {
    "gqa": Preset.of(32, 8, 128, SalsConfig()),
    # 12.5 % of the key bytes.
    "mha": Preset.of(32, 32, 128, SalsConfig(rank=0.25)),
}

SIZES = {"16x4k": (16, 4096), "8x32k": (8, 32768), "1x32k": (1, 32768), "1x128k": (1, 131072)}


@dataclass
class Layer:
    """One site's state, weights and inputs, with random contents."""

    state: dict[str, Tensor]
    rows: dict[str, Tensor]
    key_pre: Tensor
    key: Tensor
    value: Tensor
    query: Tensor
    encoder: Tensor
    decoder: Tensor
    decoder_codes: Tensor
    decoder_scales: Tensor
    transform: Tensor
    slots: Tensor
    position: Tensor
    preset: Preset
    selected: int
    scores: Tensor | None = None
    indices: Tensor | None = None
    int8: bool = True
    head_score: str = "sum"

    def encode(self) -> None:
        torch.ops.sals.encode(
            **self.state, key_pre=self.key_pre, key=self.key, value=self.value, encoder=self.encoder,
            value_transform=self.transform, slots=self.slots,
        )  # fmt: skip

    def _score_arguments(self) -> tuple[Any, ...]:
        total = self.state["codes"].shape[1]
        return (
            self.query, self.state["codes"], self.state["scales"], self.decoder, self.rows["block_cos"],
            self.rows["block_sin"], self.rows["ring_slots"], self.slots, CAUSAL, [self.position], [], total,
            self.preset.score_rank, SINKS, "half",
        )  # fmt: skip

    def _by_head(self) -> tuple[str, float]:
        return self.head_score, self.preset.head_dim**-0.5

    def score(self) -> Tensor:
        return torch.ops.sals.score(*self._score_arguments(), *self._by_head())

    def select(self) -> Tensor:
        return torch.ops.sals.select(self.scores, self.selected)

    def select_512(self) -> Tensor:
        return torch.ops.sals.select(self.scores, 512)

    def score_select(self) -> Tensor:
        return torch.ops.sals.score_select(*self._score_arguments(), self.selected, *self._by_head())

    def _attend_arguments(self, indices: Tensor | None) -> tuple[Any, ...]:
        return (
            self.query, self.indices if indices is None else indices, self.state["codes"], self.state["scales"],
            self.state["value_codes"], self.state["value_scales"], self.state["ring_key"], self.state["ring_value"],
            self.rows["ring_slots"], self.rows["cos"], self.rows["sin"], self.decoder, self.transform, CAUSAL,
            [self.position], [], self.preset.head_dim**-0.5, "half", None,
            self.decoder_codes if self.int8 else None, self.decoder_scales if self.int8 else None,
        )  # fmt: skip

    def attend(self, indices: Tensor | None = None) -> Tensor:
        return torch.ops.sals.attend(*self._attend_arguments(indices))

    def error(self) -> float:
        """Relative error of ``attend`` against the reference meaning in fp64, on the same state and tokens."""
        found = self.attend()
        # Everything that the reference does starts with `.float()`.
        with mock.patch.object(Tensor, "float", Tensor.double):
            expected = reference.attend(*self._attend_arguments(None))
        return float((found - expected).norm() / expected.norm())

    def step(self) -> Tensor:
        """The whole sparse decode step of a site."""
        state, rows = self.state, self.rows
        return torch.ops.sals.decode(
            *state.values(), self.query, self.key_pre, self.key, self.value, self.encoder, self.decoder, self.transform,
            self.slots, rows["ring_slots"], rows["cos"], rows["sin"], rows["block_cos"], rows["block_sin"], CAUSAL,
            [self.position], [], state["codes"].shape[1], self.preset.score_rank, SINKS, "half", self.selected,
            self.preset.head_dim**-0.5, self.head_score, None, self.decoder_codes if self.int8 else None,
            self.decoder_scales if self.int8 else None,
        )  # fmt: skip

    def separate_steps(self) -> Tensor:
        """The same by three operators, which need nothing of each other's launches."""
        self.encode()
        return self.attend(self.score_select())


def shared_rows(tokens: int, dim: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rotary rows of a cache that is full but for its last slot, and their means; all layers share them."""
    frequencies = 500000.0 ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angles = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * frequencies
    cos, sin = (torch.cat((f(angles), f(angles)), -1)[None].to(dtype) for f in (torch.cos, torch.sin))
    rows = {
        "cos": torch.zeros(1, tokens, dim, dtype=dtype, device=device),
        "sin": torch.zeros(1, tokens, dim, dtype=dtype, device=device),
        "block_cos": torch.zeros(1, tokens // reference.BLOCK, dim, device=device),
        "block_sin": torch.zeros(1, tokens // reference.BLOCK, dim, device=device),
        "ring_slots": torch.full((1, WINDOW), -1, dtype=torch.int32, device=device),
    }
    torch.ops.sals.record_rows(**rows, new_cos=cos, new_sin=sin, slots=torch.arange(tokens, device=device)[None])
    return rows


def make_layer(
    preset: Preset, batch: int, tokens: int, rows: dict[str, Tensor], generator: torch.Generator, budget: int = 512
) -> Layer:
    """A layer whose cache holds ``tokens`` tokens, the last of which this step writes."""
    device = rows["cos"].device
    dtype = torch.bfloat16
    n, d, e = preset.kv_heads, preset.head_dim, preset.joint

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    group = reference.value_group(d)
    codes = torch.randint(-127, 128, (batch, tokens, preset.rank), dtype=torch.int8, device=device, generator=generator)
    # Steps of about 2/15 of a unit and minima near -1, so that values are of the size of real ones.
    value_scales = torch.rand(batch, tokens, n, d // group, 2, device=device, generator=generator)
    value_scales = (
        value_scales * torch.tensor([0.1, 0.2], device=device) + torch.tensor([0.08, -1.1], device=device)
    ).half()
    state = {
        "codes": codes,
        "scales": (torch.rand(batch, tokens, device=device, generator=generator) * 0.01 + 0.01).half(),
        "value_codes": torch.randint(
            0, 256, (batch, tokens, n, d // 2), dtype=torch.uint8, device=device, generator=generator
        ),
        "value_scales": value_scales,
        "ring_key": normal(batch, WINDOW, n, d),
        "ring_value": normal(batch, WINDOW, n, d),
    }
    decoder = normal(preset.rank, e, dtype=torch.float32) / math.sqrt(preset.rank)
    decoder_codes, decoder_scales = reference.quantize_decoder(decoder, d, d, "half")
    position = torch.tensor(tokens - 1, device=device)
    return Layer(
        state=state,
        rows=rows,
        key_pre=normal(batch, 1, n, d),
        key=normal(batch, 1, n, d),
        value=normal(batch, 1, n, d),
        query=normal(batch, 1, preset.heads, d),
        encoder=(normal(e, preset.rank, dtype=torch.float32) / math.sqrt(e)).to(dtype),
        decoder=decoder.to(dtype),
        decoder_codes=decoder_codes,
        decoder_scales=decoder_scales,
        transform=reference.hadamard(d, device=device),
        slots=position.view(1, 1),
        position=position,
        preset=preset,
        selected=budget - WINDOW,
    )


def time_graph(functions: Sequence[Callable[[], Any]], replays: int = 30) -> float:
    """Microseconds per function: median over ``replays`` of one CUDA graph that runs them all, over their number."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for function in functions[:2]:
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for function in functions:
            function()
    times = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(functions))
    return statistics.median(times[3:])


def dense_baselines(
    preset: Preset, batch: int, tokens: int, device: torch.device, which: Sequence[str]
) -> dict[str, float]:
    """Microseconds of each dense decode kernel; one that does not run here is left out."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    size = 2 * batch * tokens * preset.joint * 2
    copies = max(2, math.ceil(COLD_BYTES / size))
    shape = (batch, preset.kv_heads, tokens, preset.head_dim)
    caches = [
        (
            torch.randn(shape, dtype=torch.bfloat16, device=device),
            torch.randn(shape, dtype=torch.bfloat16, device=device),
        )
        for _ in range(copies)
    ]
    query = torch.randn(batch, preset.heads, 1, preset.head_dim, dtype=torch.bfloat16, device=device)
    grouped = preset.heads != preset.kv_heads
    found: dict[str, float] = {}
    kernels: dict[str, Callable[[Tensor, Tensor], Any]] = {}

    def sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor], Any]:
        def run(key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)

        return run

    if "cudnn" in which:
        kernels["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    if "flash" in which:
        kernels["flash"] = sdpa(SDPBackend.FLASH_ATTENTION)
    if "flex" in which:
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        kernels["flex"] = lambda key, value: compiled(query, key, value, enable_gqa=grouped)
    for name, kernel in kernels.items():
        try:
            found[name] = time_graph([partial(kernel, k, v) for k, v in caches])
        except Exception as error:
            print(
                f"{name}: does not run here ({type(error).__name__}: {str(error).splitlines()[0][:120]})",
                file=sys.stderr,
            )
    return found


def floors(preset: Preset, batch: int, tokens: int, selected: int, int8: bool) -> dict[str, dict[str, float]]:
    """Per stage: bytes that it must move, FLOPs that it must do, and the larger of the two times in µs."""
    e, r, n, d = preset.joint, preset.rank, preset.kv_heads, preset.head_dim
    value_row = n * (d // 2 + 4 * (d // reference.value_group(d)))
    needs = {
        "encode": (2 * e * r + batch * (3 * 2 * e + 2 * 2 * e + r + value_row), 2 * batch * e * r, "bf16"),
        "score": (batch * tokens * (preset.score_rank + 2 + 4) + 2 * e * preset.score_rank, 0, "bf16"),
        "select": (batch * tokens * 4, 0, "bf16"),
        "attend": (
            batch * selected * (r + 2 + value_row + 4 * d) + batch * WINDOW * 2 * 2 * e + (1 if int8 else 2) * r * e,
            2 * batch * selected * r * e,
            "int8" if int8 else "bf16",
        ),
    }
    result = {}
    for stage, (moved, flops, unit) in needs.items():
        result[stage] = {"bytes": moved, "flops": flops, "us": 1e6 * max(moved / RATES["bytes"], flops / RATES[unit])}
    # The scores stay in L2 between score and select, and are not counted again.
    result["total"] = {"us": sum(result[s]["us"] for s in ("encode", "score", "attend"))}
    return result


@dataclass
class Row:
    """One shape and batch: every time in µs."""

    shape: str
    size: str
    head_score: str
    stages: dict[str, float]
    floors: dict[str, float]
    dense: dict[str, float] = field(default_factory=dict)
    int8: bool = True
    error: float = math.nan
    repeats: bool = False

    @property
    def best_dense(self) -> float | None:
        return min(self.dense.values(), default=None)

    @property
    def ratio(self) -> float | None:
        return self.best_dense / self.stages["total"] if self.best_dense else None


def measure(preset: Preset, size: str, dense: Sequence[str], int8: bool, head_score: str, budget: int = 512) -> Row:
    """Every stage, the whole step and the dense baselines at one size. Needs a GPU."""
    batch, tokens = SIZES[size]
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    rows = shared_rows(tokens, preset.head_dim, device, torch.bfloat16)
    touched = (
        batch * tokens * preset.score_rank
        + batch * budget * (preset.rank + preset.joint)
        + 3 * preset.rank * preset.joint
    )
    count = min(12, max(4, math.ceil(COLD_BYTES / touched)))
    layers = [make_layer(preset, batch, tokens, rows, generator, budget) for _ in range(count)]
    for layer in layers:
        layer.int8, layer.head_score = int8, head_score
        layer.scores = layer.score()
        layer.indices = layer.select()
    stages = {
        name: time_graph([getattr(layer, name) for layer in layers])
        for name in ("encode", "score", "select", "select_512", "score_select", "attend", "separate_steps", "step")
    }
    stages["total"] = stages.pop("step")
    needed = {k: v["us"] for k, v in floors(preset, batch, tokens, budget - WINDOW, int8).items()}
    error, repeats = layers[0].error(), torch.equal(layers[0].step(), layers[0].step())
    del layers, layer
    torch.cuda.empty_cache()
    measured = dense_baselines(preset, batch, tokens, device, dense)
    return Row(preset.name, size, head_score, stages, needed, measured, int8, error, repeats)


def stateless(tokens: int = 32768, attended: int = 2048, query_block: int = 64) -> dict[str, float]:
    """Milliseconds of causal whole-sequence attention, B=1, 32/8/128: ours (selection included), and dense kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    preset, device = PRESETS["gqa"], torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

    query = normal(1, tokens, preset.heads, preset.head_dim)
    key_pre, key, value = (normal(1, tokens, preset.kv_heads, preset.head_dim) for _ in range(3))
    rows = shared_rows(tokens, preset.head_dim, device, torch.bfloat16)
    encoder, decoder = normal(preset.joint, preset.score_rank), normal(preset.score_rank, preset.joint)
    modifier: tuple[str, list[Tensor], list[int]] = (CAUSAL, [torch.tensor(0, device=device)], [])

    def ours() -> Tensor:
        chosen = torch.ops.sals.block_select(
            query, key_pre, rows["cos"], rows["sin"], encoder, decoder, *modifier, query_block, attended, SINKS, WINDOW,
            "half",
        )  # fmt: skip
        return torch.ops.sals.block_attend(query, key, value, chosen, *modifier, query_block, preset.head_dim**-0.5)

    def dense(backend: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
                )

        return run

    found = {"ours": time_graph([ours], 5) / 1e3}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            found[name] = time_graph([dense(backend)], 5) / 1e3
        except RuntimeError as error:
            print(f"{name}: does not run here ({str(error).splitlines()[0][:120]})", file=sys.stderr)
    return found


def dense_decode(preset: Preset, size: str = "8x32k") -> float:
    """Microseconds of dense decode by our kernel: a mask that bounds the keys, read on the device."""
    batch, tokens = SIZES[size]
    device = torch.device("cuda")
    shape = (batch, tokens, preset.kv_heads, preset.head_dim)
    query = torch.randn(batch, 1, preset.heads, preset.head_dim, dtype=torch.bfloat16, device=device)
    position = torch.tensor(tokens - 1, device=device)
    caches = [[torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2)] for _ in range(2)]
    return time_graph(
        [
            partial(
                torch.ops.sals.dense_attention, query, key, value, CAUSAL, [position], [], preset.head_dim**-0.5
            )
            for key, value in caches
        ]
    )  # fmt: skip


#: Least ratios of the best dense kernel to the whole step, by preset and size.
RATIOS = {
    "gqa": {"16x4k": 2.5, "8x32k": 5.7, "1x128k": 5.7},
    "mha": {"16x4k": 3.0, "8x32k": 8.0, "1x128k": 8.0},
}


def targets(rows: Sequence[Row], others: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What is asked, the least or most that will do, what was measured, and whether that does."""
    lines: list[tuple[str, str, str, bool]] = []
    names = {preset.name: name for name, preset in PRESETS.items()}
    for row in rows:
        rebuild = f"{row.head_score}, {'int8' if row.int8 else 'bf16'}"
        least = RATIOS[names[row.shape]].get(row.size)
        if least and row.ratio:
            what = f"{row.shape} {row.size}, {rebuild}: best dense / step"
            lines.append((what, f"≥ {least}", f"{row.ratio:.2f}", row.ratio >= least))
        if row.size == "16x4k" and row.shape == PRESETS["mha"].name and "flash" in row.dense:
            ratio = row.dense["flash"] / row.stages["total"]
            lines.append((f"{row.shape} {row.size}, {rebuild}: flash / step", "≥ 5.7", f"{ratio:.2f}", ratio >= 5.7))
        lines.append((f"{row.shape} {row.size}, {rebuild}: error", "≤ 1e-2", f"{row.error:.1e}", row.error <= 1e-2))
        lines.append((f"{row.shape} {row.size}, {rebuild}: twice the same", "yes", str(row.repeats), row.repeats))
        if row.int8 and row.head_score == "sum" and row.size in ("8x32k", "1x128k"):
            time = row.stages["select_512"]
            lines.append((f"{row.shape} {row.size}: select of 512, µs", "≤ 12", f"{time:.1f}", time <= 12))
    by_size = {(row.shape, row.size, row.head_score, row.int8): row for row in rows}
    for shape, size, score, int8 in by_size:
        if size == "1x128k" and (shape, "1x32k", score, int8) in by_size:
            short, long = by_size[shape, "1x32k", score, int8], by_size[shape, size, score, int8]
            growth = long.stages["total"] / short.stages["total"]
            dense = long.best_dense / short.best_dense if long.best_dense and short.best_dense else math.nan
            what = f"{shape} 1x32k to 1x128k, {score}, {'int8' if int8 else 'bf16'}: growth (dense: {dense:.1f})"
            lines.append((what, "< 2", f"{growth:.2f}", growth < 2))
    for name, time in others.get("dense_decode", {}).items():
        best = min((r.best_dense for r in rows if r.shape == name and r.size == "8x32k" and r.best_dense), default=None)
        if best:
            lines.append((f"{name} 8x32k: our dense / best dense", "≤ 1.15", f"{time / best:.2f}", time <= 1.15 * best))
    if "stateless" in others:
        times = dict(others["stateless"])
        ours = times.pop("ours")
        if times:
            ratio = min(times.values()) / ours
            lines.append(("32/8/128 1x32k, T=2048, stateless: best dense / ours", "≥ 3", f"{ratio:.2f}", ratio >= 3))
    return lines


def environment() -> dict[str, str]:
    """What the figures were measured on."""
    import triton

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def show(rows: Sequence[Row], about: dict[str, str]) -> None:
    """A table of the rows: times in µs, and each over its floor."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"sparse decode step, µs ({about['gpu']}, torch {about['torch']}, triton {about['triton']})")
    dense = sorted({name for row in rows for name in row.dense})
    for column in (
        "shape",
        "B×S",
        "scores",
        "rebuild",
        "encode",
        "score+select",
        "attend",
        "three ops",
        "total",
        "total/floor",
        *dense,
        "best/total",
    ):
        table.add_column(column, justify="right")
    for row in rows:

        def stage(name: str, floor: float, row: Row = row) -> str:
            return f"{row.stages[name]:.1f} ({row.stages[name] / floor:.1f}×)"

        table.add_row(
            row.shape, row.size, row.head_score, "int8" if row.int8 else "bf16",
            stage("encode", row.floors["encode"]), stage("score_select", row.floors["score"]),
            stage("attend", row.floors["attend"]), f"{row.stages['separate_steps']:.1f}",
            f"{row.stages['total']:.1f}",
            f"{row.stages['total'] / row.floors['total']:.1f}",
            *(f"{row.dense[name]:.1f}" if name in row.dense else "–" for name in dense),
            f"{row.ratio:.2f}" if row.ratio else "–",
        )  # fmt: skip
    Console(width=180 if not sys.stdout.isatty() else None).print(table)


def show_targets(lines: Sequence[tuple[str, str, str, bool]]) -> None:
    """A table of what is asked and what was measured."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="targets")
    for column in ("what", "target", "measured", "met"):
        table.add_column(column)
    for what, target, measured, met in lines:
        table.add_row(what, target, measured, "yes" if met else "NO")
    Console(width=120 if not sys.stdout.isatty() else None).print(table)


def plot(rows: Sequence[Row], path: str) -> None:
    """Stacked stages beside the best dense kernel of every row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(1.6 * len(rows) + 2, 4))
    for position, row in enumerate(rows):
        base = 0.0
        for color, name in enumerate(("encode", "score_select", "attend")):
            label = name.replace("_", " + ") if position == 0 else None
            axes.bar(position - 0.2, row.stages[name], 0.38, bottom=base, color=f"C{color}", label=label)
            base += row.stages[name]
        if row.best_dense:
            axes.bar(position + 0.2, row.best_dense, 0.38, color="0.7", label="best dense" if position == 0 else None)
    axes.set_xticks(range(len(rows)), [f"{row.shape}\n{row.size}" for row in rows])
    axes.set_ylabel("µs per decode step of one site")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    arguments = argparse.ArgumentParser(prog="sals bench operator", description=__doc__.split("\n")[0])
    arguments.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    arguments.add_argument("--sizes", nargs="+", default=["16x4k", "8x32k", "1x32k", "1x128k"], choices=list(SIZES))
    arguments.add_argument("--dense", nargs="*", default=["cudnn", "flash", "flex"], choices=["cudnn", "flash", "flex"])
    arguments.add_argument(
        "--budget", type=int, default=512, help="tokens attended per query, the recent window included"
    )
    arguments.add_argument("--rebuild", nargs="+", default=["int8", "bf16"], choices=["int8", "bf16"])
    arguments.add_argument("--head-score", nargs="+", default=["mass", "sum"], choices=HEAD_SCORE)
    arguments.add_argument(
        "--stateless", action=argparse.BooleanOptionalAction, default=True, help="also whole-sequence attention"
    )
    arguments.add_argument("--json", metavar="FILE", help="write the figures here")
    arguments.add_argument("--plot", metavar="FILE", help="write a bar chart here (needs matplotlib)")
    return arguments


def run(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 2 when there is no GPU to measure on."""
    options = parser().parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "sals bench operator measures kernels on a CUDA or ROCm device, and this machine has none.", file=sys.stderr
        )
        return 2
    if not dispatch.has_triton():
        print("sals bench operator needs Triton (pip install triton).", file=sys.stderr)
        return 2
    about = environment()
    rows: list[Any] = []
    for name in options.presets:
        for size in options.sizes:
            variants = [(score, rebuild) for score in options.head_score for rebuild in options.rebuild]
            for position, (score, rebuild) in enumerate(variants):
                dense = options.dense if position == 0 else []
                row = measure(PRESETS[name], size, dense, rebuild == "int8", score, options.budget)
                row.dense = row.dense or rows[-1].dense
                rows.append(row)
    others: dict[str, Any] = {}
    if "8x32k" in options.sizes:
        others["dense_decode"] = {PRESETS[name].name: dense_decode(PRESETS[name]) for name in options.presets}
    if options.stateless:
        others["stateless"] = stateless()
    show(rows, about)
    lines = targets(rows, others)
    show_targets(lines)
    if options.json:
        measured = {
            "environment": about,
            "rows": [asdict(r) | {"ratio": r.ratio} for r in rows],
            "targets": lines,
            **others,
        }
        with open(options.json, "w") as file:
            json.dump(measured, file, indent=1)
    if options.plot:
        plot(rows, options.plot)
    return 0


main = run

if __name__ == "__main__":
    raise SystemExit(run())
