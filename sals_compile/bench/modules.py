"""`sals bench modules`: where a decode step's attention spends its time, as the context grows.

Two methods on the same stored latents, at one length after another: *SALS* (score, select, rebuild the selected
tokens) and *rebuilt* (every cached token rebuilt, rotated and attended: what low-rank KV compression costs without
selection). Both are cut into the same modules:

=========  =============================================================================================
TopK       scores of all cached tokens from their latents, and the exact selection (SALS only)
Recover    keys rebuilt from latents and rotated, values dequantised, written to memory as dense tiles
p=qk       logits of the query against those keys
softmax    over the logits
y=pv       the weighted sum of those values
=========  =============================================================================================

Each module is timed alone, reading what the one before it wrote; then each method is timed as it really runs,
*fused*: `score_select` and `attend`, or `reconstruct`, which keep all of that in registers. The bars of a stacked
plot are the modules, the mark is the fused whole.

On a GPU the times are medians of CUDA-graph replays over as many copies of the caches as exceed the L2 cache. On a
CPU the operators' reference meanings run, uncompiled: good for seeing that everything works and how it scales, not
for comparing methods.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels import dispatch, ops, reference  # noqa: F401  (importing them registers the operators)
from .operator import CAUSAL, COLD_BYTES, PRESETS, WINDOW, Layer, Preset, make_layer, shared_rows, time_graph

MODULES = ("TopK", "Recover", "p=qk", "softmax", "y=pv")
METHODS = ("SALS", "rebuilt")

GPU_LENGTHS = (8192, 16384, 32768, 65536, 131072)
CPU_LENGTHS = (512, 1024, 2048)

#: Small enough for a CPU: 16 latent coordinates a head, a quarter of them scored.
TINY = Preset("8/4/64", 8, 4, 64, 128, 64)


@dataclass(frozen=True)
class Row:
    """One method at one context length; times in µs per decode step of one attention site."""

    method: str
    tokens: int
    modules: dict[str, float]
    fused: float

    @property
    def total(self) -> float:
        return sum(self.modules.values())


def time_host(functions: Sequence[Callable[[], Any]], repeats: int = 5) -> float:
    """Microseconds per function on the CPU: median over ``repeats`` rounds of all of them, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for function in functions:
            function()
        times.append((time.perf_counter() - start) * 1e6 / len(functions))
    return statistics.median(times[1:])


def recover(layer: Layer, indices: Tensor | None) -> tuple[Tensor, Tensor]:
    """Dense rotated keys and values ``[B,K,N,D]`` of the selected tokens; of every cached one without ``indices``."""
    state, rows = layer.state, layer.rows
    stored = [state[name] for name in ("codes", "scales", "value_codes", "value_scales")]
    cos, sin = rows["cos"], rows["sin"]
    ring_slots = rows["ring_slots"]
    capacity = stored[0].shape[1]
    if indices is not None:
        chosen = indices[:, 0].clamp_min(0).long()  # [B,K]
        batch = torch.arange(chosen.shape[0], device=chosen.device).unsqueeze(1)
        stored = [x[batch, chosen] for x in stored]
        cos, sin = cos[0][chosen], sin[0][chosen]
        # Selected tokens are never those of the exact ring.
        ring_slots = torch.full_like(ring_slots, -1)
        capacity = chosen.shape[1]
    return torch.ops.sals.materialize(
        *stored,
        state["ring_key"],
        state["ring_value"],
        ring_slots,
        cos,
        sin,
        layer.decoder,
        layer.transform,
        capacity,
        "half",
    )


def with_ring(layer: Layer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The exact recent tokens appended to the recovered ones."""
    return torch.cat((key, layer.state["ring_key"]), 1), torch.cat((value, layer.state["ring_value"]), 1)


def by_head(tiles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """``[B,K,N,D]`` to ``[B,N,K,D]`` in memory, which batched products take as it is."""
    key, value = tiles
    return key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()


def select_and_attend(layer: Layer) -> Tensor:
    """The SALS method, fused."""
    return layer.attend(layer.score_select())


def reconstruct(layer: Layer) -> Tensor:
    """The rebuilt method, fused."""
    state, rows = layer.state, layer.rows
    return torch.ops.sals.reconstruct(
        layer.query,
        *(state[name] for name in ("codes", "scales", "value_codes", "value_scales", "ring_key", "ring_value")),
        rows["ring_slots"], rows["cos"], rows["sin"], layer.decoder, layer.transform, CAUSAL, [layer.position], [],
        state["codes"].shape[1], layer.preset.head_dim**-0.5, "half",
    )  # fmt: skip


def _attention_modules(
    layers: Sequence[Layer], tiles: Sequence[tuple[Tensor, Tensor]], clock: Callable[..., float]
) -> dict[str, float]:
    """Times of the three steps of attention over dense keys and values ``[B,N,K,D]``."""
    preset = layers[0].preset
    scale = preset.head_dim**-0.5
    queries = [layer.query[:, 0].unflatten(1, (preset.kv_heads, -1)) * scale for layer in layers]  # [B,N,G,D]
    logits = [query @ key.mT for query, (key, _) in zip(queries, tiles, strict=True)]
    weights = [torch.softmax(x, -1) for x in logits]
    return {
        "p=qk": clock([partial(torch.matmul, q, k.mT) for q, (k, _) in zip(queries, tiles, strict=True)]),
        "softmax": clock([partial(torch.softmax, x, -1) for x in logits]),
        "y=pv": clock([partial(torch.matmul, w, v) for w, (_, v) in zip(weights, tiles, strict=True)]),
    }


def measure(
    preset: Preset, batch: int, tokens: int, budget: int, device: torch.device, methods: Sequence[str] = METHODS
) -> list[Row]:
    """Both methods at one context length. ``budget`` tokens are attended by SALS, the recent window included."""
    clock = time_graph if device.type == "cuda" else time_host
    generator = torch.Generator(device).manual_seed(0)
    rows = shared_rows(tokens, preset.head_dim, device, torch.bfloat16)
    cold = math.ceil(COLD_BYTES / (batch * tokens * preset.score_rank)) if device.type == "cuda" else 1
    layers = [make_layer(preset, batch, tokens, rows, generator, budget) for _ in range(min(8, cold))]
    result = []
    if "SALS" in methods:
        chosen = [layer.score_select() for layer in layers]
        for layer, indices in zip(layers, chosen, strict=True):
            layer.indices = indices
        modules = {
            "TopK": clock([layer.score_select for layer in layers]),
            "Recover": clock([partial(recover, layer, i) for layer, i in zip(layers, chosen, strict=True)]),
        }
        tiles = [by_head(with_ring(layer, *recover(layer, i))) for layer, i in zip(layers, chosen, strict=True)]
        modules |= _attention_modules(layers, tiles, clock)
        fused = clock([partial(select_and_attend, layer) for layer in layers])
        result.append(Row("SALS", tokens, modules, fused))
        del tiles
    if "rebuilt" in methods:
        # Dense keys and values of all tokens are far larger than any cache, so that two layers are cold enough.
        layers = layers[: 1 if batch * tokens * preset.joint * 2 > COLD_BYTES else 2]
        modules = {"TopK": 0.0, "Recover": clock([partial(recover, layer, None) for layer in layers])}
        tiles = [by_head(recover(layer, None)) for layer in layers]
        modules |= _attention_modules(layers, tiles, clock)
        del tiles
        result.append(Row("rebuilt", tokens, modules, clock([partial(reconstruct, layer) for layer in layers])))
    return result


def environment(device: torch.device) -> dict[str, str]:
    """What the figures were measured on."""
    about = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__}
    if device.type == "cuda":
        import triton

        return about | {"device": torch.cuda.get_device_name(device), "triton": triton.__version__}
    return about | {"device": f"{processor()}, threads: {torch.get_num_threads()}"}


def processor() -> str:
    """The processor's name as the system gives it, else its architecture."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{platform.machine()} CPU"


def as_record(rows: Sequence[Row], about: dict[str, str], preset: Preset, batch: int, budget: int) -> dict[str, Any]:
    """Everything measured, for JSON; ``topk_share`` is the share of TopK in the sum of the modules."""
    return {
        "benchmark": "modules",
        "environment": about,
        "preset": asdict(preset),
        "batch": batch,
        "budget": budget,
        "unit": "us",
        "rows": [asdict(r) | {"total": r.total, "topk_share": r.modules["TopK"] / r.total} for r in rows],
    }


def table(rows: Sequence[Row], about: dict[str, str], title: str) -> Any:
    """A rich table of all times in µs."""
    from rich.table import Table

    shown = Table(title=f"{title}, µs per decode step of one site ({about['device']}, torch {about['torch']})")
    for column in ("tokens", "method", *MODULES, "modules", "fused", "rebuilt/SALS"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    sals = {row.tokens: row.fused for row in rows if row.method == "SALS"}
    for row in rows:
        ratio = f"{row.fused / sals[row.tokens]:.1f}" if row.method == "rebuilt" and row.tokens in sals else ""
        cells = [f"{row.modules[name]:.1f}" if row.modules[name] else "–" for name in MODULES]
        shown.add_row(str(row.tokens), row.method, *cells, f"{row.total:.1f}", f"{row.fused:.1f}", ratio)
    return shown


def plot(rows: Sequence[Row], path: str | Path, title: str) -> None:
    """One panel a method: stacked bars of the modules at each length, a mark at the fused time. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sals = {row.tokens: row.fused for row in rows if row.method == "SALS"}
    methods = [m for m in METHODS if any(row.method == m for row in rows)]
    lengths = sorted({row.tokens for row in rows})
    size = (1.0 * len(lengths) * len(methods) + 3, 4.2)
    figure, panels = pyplot.subplots(1, len(methods), figsize=size, layout="constrained", squeeze=False)
    for axes, method in zip(panels[0], methods, strict=True):
        for row in (row for row in rows if row.method == method):
            position, base = lengths.index(row.tokens), 0.0
            for color, name in enumerate(MODULES):
                axes.bar(position, row.modules[name] / 1e3, 0.7, bottom=base, color=f"C{color}", label=name)
                base += row.modules[name] / 1e3
            axes.plot(position, row.fused / 1e3, "k_", markersize=24, markeredgewidth=2, label="fused whole")
            if method == "rebuilt" and row.tokens in sals:
                text = f"{row.fused / sals[row.tokens]:.1f}×"
                axes.annotate(
                    text, (position, max(row.fused, row.total) / 1e3), (0, 4), textcoords="offset points", ha="center"
                )
        axes.margins(y=0.12)
        axes.set_xticks(range(len(lengths)), [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
        axes.set_xlabel("cached tokens")
        titles = {"SALS": "SALS", "rebuilt": "every token rebuilt (×: over SALS, fused)"}
        axes.set_title(titles[method], fontsize=10)
    panels[0][0].set_ylabel("ms per decode step of one attention site (each panel its own scale)", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))  # every bar of a module has the same label
    figure.legend(unique.values(), unique.keys(), fontsize=8, loc="outside right upper")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    arguments = argparse.ArgumentParser(prog="sals bench modules", description=__doc__.split("\n")[0])
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--preset", choices=[*PRESETS, "tiny"], help="default: mha on a GPU, tiny on a CPU")
    arguments.add_argument("--batch", type=int, help="default: 8 on a GPU, 1 on a CPU")
    arguments.add_argument("--lengths", type=int, nargs="+", help="cached tokens, multiples of 128")
    arguments.add_argument("--budget", type=int, help="tokens SALS attends, the recent window included")
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments.add_argument("--json", metavar="FILE", help="write the figures here")
    arguments.add_argument("--plot", metavar="FILE", help="write a bar chart here (needs matplotlib)")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``sals bench modules``. Returns the exit code."""
    from rich.console import Console

    arguments = parser()
    options = arguments.parse_args(argv)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    name = options.preset or ("mha" if on_gpu else "tiny")
    preset = TINY if name == "tiny" else PRESETS[name]
    batch = options.batch or (8 if on_gpu else 1)
    lengths = options.lengths or (GPU_LENGTHS if on_gpu else CPU_LENGTHS)
    budget = options.budget or (512 if on_gpu else 256)
    wrong = [n for n in lengths if n % reference.BLOCK or n < budget]
    if wrong:
        arguments.error(f"--lengths {wrong}: multiples of {reference.BLOCK}, at least the budget of {budget}")
    if budget <= WINDOW:
        arguments.error(f"--budget {budget}: must exceed the recent window of {WINDOW}")
    rows: list[Row] = []
    for tokens in lengths:
        rows += measure(preset, batch, tokens, budget, device, options.methods)
        print(f"{tokens} tokens measured", file=sys.stderr)
    about = environment(device)
    title = f"{preset.name}, batch {batch}, rank {preset.rank}, {budget} tokens attended"
    Console(width=150 if not sys.stdout.isatty() else None).print(table(rows, about, title))
    if options.json:
        Path(options.json).write_text(json.dumps(as_record(rows, about, preset, batch, budget), indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot, f"{title}\n{about['device']}, torch {about['torch']}, {about['date']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
