"""``sals figures --out DIR``: the three figures that this project is judged by, from measurements made here and now.

1. *Time per module* (`sals bench modules`): SALS beside low-rank attention that rebuilds all keys, as contexts grow.
2. *Rotary embedding and PCA*: a real model's keys before and after the rotary embedding, every layer. The claim tested:
   the rotary embedding raises the rank that a low-rank latent needs.
3. *Speed-up against context length*, with the query projection whole and factored (``query_rank``): (a) one attention
   block, projections included, at a fixed batch; (b) tokens per second of a whole model in a fixed amount of memory,
   each method with the largest batch that fits.

Each is one PNG and the JSON behind it. On a GPU in full (a few minutes on an H200); on a CPU small.

How figure 3 is measured. The model is a Llama of the named shape with random weights; every layer has weights and a
full cache of its own, random too (speed does not depend on their values). One decode step of all layers runs, on a GPU
as one CUDA graph, on a CPU uncompiled. *Dense* is the faster of cuDNN's and FlashAttention's
``scaled_dot_product_attention`` without a mask, its best case. SALS runs the operators that ``backend="sals"`` puts
into a decode graph where scores are summed over heads (``sals::decode``), over latents alone, without dense buffers.
Memory is counted in bytes: weights (a factored query projection beside the whole one, as the compiler keeps both),
caches, and room for activations; on a GPU the allocator's peak is checked against the budget afterwards.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import modules
from .decode import SHAPES
from .operator import COLD_BYTES, PRESETS, Layer, Preset, make_layer, shared_rows, time_graph

#: Bytes kept free of caches for activations, split-KV partial results and logits.
WORKSPACE = {"cuda": 3 << 28, "cpu": 1 << 26}

GPU_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
CPU_LENGTHS = (1024, 2048, 4096)

#: Attention geometry and compression of each shape that figure 3 knows; rank and score rank in latent coordinates.
GEOMETRY = {
    "llama-2-7b": PRESETS["mha"],
    "llama-3-8b": PRESETS["gqa"],
    "smollm2-135m": Preset("9/3/64", 9, 3, 64, 96, 24),
    "tiny": Preset("4/2/64", 4, 2, 64, 64, 16),
}

Advance = Callable[[str], None]


# ---- figure 2: rotary embedding and PCA ------------------------------------------------------------------------------


def observed_keys(model: Any, tokens: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Joint keys of every attention site of a model on ``tokens [1, S]``, by site name: before and after the rotary
    embedding, each ``[S, E]`` in fp32 on the CPU.

    Raises ``CalibrationError`` where no site matches.
    """
    from ..calibrate import CalibrationError, _cheap_arguments, _Observer, _own_code

    found: dict[str, dict[str, Tensor]] = {}

    class Keys(_Observer):
        def _watches(self, sites: Sequence[Any]) -> dict[Any, list[Callable[[Any], None]]]:
            watches: dict[Any, list[Callable[[Any], None]]] = {}
            for site in sites:
                for when, operand in (("before", site.key_pre), ("after", site.key)):
                    watches.setdefault(operand.node, []).append(partial(self._keep, site.name, when, operand))
            return watches

        def _keep(self, name: str, when: str, operand: Any, value: Tensor) -> None:
            rows = operand.read(lambda _: value)
            found.setdefault(name, {})[when] = rows.flatten(2).flatten(0, 1).float().cpu()

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(_own_code(model.forward), backend=Keys().backend)(tokens, **_cheap_arguments(model))
    torch._dynamo.reset()
    if not found:
        raise CalibrationError("no attention site of this model matched: `sals explain` shows why")
    return {name: (keys["before"], keys["after"]) for name, keys in found.items()}


def spectrum(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Variances along the principal directions of ``keys [S, E]``, descending ``[E]``; the directions ``[E, E]``."""
    centred = keys.double() - keys.double().mean(0)
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(keys))
    return variances.flip(0).clamp_min(0), directions.flip(1)


def rank_for(variances: Tensor, share: float) -> int:
    """How many leading directions keep this share of the variance."""
    kept = variances.cumsum(0) / variances.sum()
    return int((kept < share - 1e-12).sum()) + 1


def rotary_and_pca(keys: dict[str, tuple[Tensor, Tensor]], shown: int, advance: Advance) -> dict[str, Any]:
    """The record of figure 2: per layer, before and after: variances, total variance, that of the two leading
    directions, and the rank that keeps 90 %; of layer ``shown`` also every token in those two directions.
    """
    layers = []
    for number, (name, pair) in enumerate(keys.items()):
        layer: dict[str, Any] = {"site": name}
        for when, rows in zip(("before", "after"), pair, strict=True):
            variances, directions = spectrum(rows)
            layer[when] = {
                "total_variance": float(variances.sum()),
                "leading_two": float(variances[:2].sum()),
                "rank_90": rank_for(variances, 0.9),
                "variances": [float(f"{v:.4g}") for v in variances],
            }
            if number == shown:
                points = (rows.double() - rows.double().mean(0)) @ directions[:, :2]
                layer[when]["points"] = [[round(float(v), 3) for v in p] for p in points]
        layers.append(layer)
        advance(f"layer {number}")
    raised = sum(la["after"]["rank_90"] > la["before"]["rank_90"] for la in layers)
    tokens, width = next(iter(keys.values()))[0].shape
    return {
        "figure": "rotary-pca",
        "shown": shown,
        "tokens": tokens,
        "width": width,
        "raised": raised,
        "layers": layers,
    }


# ---- figure 3: speed-up against context length -----------------------------------------------------------------------


@dataclass
class Weights:
    """One decoder layer's parameters; ``down`` and ``up`` are the factored query projection, where there is one."""

    norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    mlp_down: Tensor
    down: Tensor | None = None
    up: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if t is not None)

    @staticmethod
    def random(shape: str, query_rank: int | None, device: torch.device) -> Weights:
        hidden, wide, _, heads, kv_heads, _ = SHAPES[shape]
        inner, narrow = heads * GEOMETRY[shape].head_dim, kv_heads * GEOMETRY[shape].head_dim

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) / columns**0.5

        ones = torch.ones(hidden, dtype=torch.bfloat16, device=device)
        return Weights(
            ones,
            matrix(inner, hidden),
            matrix(narrow, hidden),
            matrix(narrow, hidden),
            matrix(hidden, inner),
            ones.clone(),
            matrix(2 * wide, hidden),
            matrix(hidden, wide),
            None if query_rank is None else matrix(query_rank, hidden),
            None if query_rank is None else matrix(inner, query_rank),
        )


def _project(
    x: Tensor, norm: Tensor, query: list[Tensor], key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotated query, key before and after rotation, and value ``[B,1,N,D]`` of ``x [B,1,C]``; ``query`` is one matrix
    or two."""
    dim = cos.shape[-1]
    y = functional.rms_norm(x, (x.shape[-1],), norm, 1e-5)
    q = y
    for matrix in query:
        q = functional.linear(q, matrix)
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in (q, functional.linear(y, key), functional.linear(y, value)))

    def rotate(t: Tensor) -> Tensor:
        first, second = t.chunk(2, -1)
        return t * cos + torch.cat((-second, first), -1) * sin

    return rotate(q), k, rotate(k), v


def _residual(x: Tensor, attended: Tensor, output: Tensor) -> Tensor:
    return x + functional.linear(attended.flatten(2), output)


def _mlp(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = functional.linear(functional.rms_norm(x, (x.shape[-1],), norm, 1e-5), gate_up).chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, down)


@dataclass
class Method:
    """A line of figure 3 (or the dense model): how a layer attends, and what its cache takes."""

    name: str
    query_rank: int | None = None
    sals: bool = True
    #: of ``scaled_dot_product_attention``, where dense
    kernel: str = ""

    def cache_bytes(self, preset: Preset, tokens: int, budget: int) -> int:
        """Bytes of one sequence's cache in one layer, everything counted but rotary rows, which all layers share."""
        if not self.sals:
            return 2 * tokens * preset.joint * 2
        with torch.device("meta"):
            rows = {"cos": torch.empty(1, tokens, preset.head_dim)}
            state = make_layer(preset, 1, tokens, rows, None, budget).state
        return sum(t.nbytes for t in state.values())


@dataclass
class Point:
    """One method at one context length."""

    method: str
    tokens: int
    batch: int
    us: float
    bytes: int = 0
    peak: int = 0
    error: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.batch * 1e6 / self.us if self.us else 0.0


class Decoder:
    """``layers`` decoder layers of one method over full caches of ``tokens`` tokens; :meth:`step` decodes one token."""

    def __init__(
        self,
        shape: str,
        method: Method,
        weights: Sequence[Weights],
        batch: int,
        tokens: int,
        budget: int,
        device: torch.device,
        whole: bool,
    ) -> None:
        hidden, _, _, heads, kv_heads, vocabulary = SHAPES[shape]
        preset = GEOMETRY[shape]
        self.method, self.weights, self.preset, self.whole = method, weights, preset, whole
        self.rows = shared_rows(tokens, preset.head_dim, device, torch.bfloat16)
        self.cos, self.sin = (self.rows[n][:, tokens - 1 : tokens, None].clone() for n in ("cos", "sin"))
        self.slot = torch.tensor([tokens - 1], device=device)
        self.x = torch.randn(batch, 1, hidden, dtype=torch.bfloat16, device=device)
        generator = torch.Generator(device).manual_seed(0)
        self.layers: list[Layer] = []
        self.caches: list[tuple[Tensor, Tensor]] = []
        for _ in weights:
            if method.sals:
                layer = make_layer(preset, batch, tokens, self.rows, generator, budget)
                layer.int8 = False  # as in the graphs that the compiler makes
                self.layers.append(layer)
            else:
                size = (batch, kv_heads, tokens, preset.head_dim)
                pair = [torch.empty(size, dtype=torch.bfloat16, device=device).normal_() for _ in range(2)]
                self.caches.append((pair[0], pair[1]))
        if whole:
            self.embedding, self.head = (
                torch.randn(vocabulary, hidden, dtype=torch.bfloat16, device=device) for _ in range(2)
            )
            self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        parts = (_project, _residual, _mlp)
        made: list[Any] = [torch.compile(f, dynamic=True) if device.type == "cuda" else f for f in parts]
        self.project, self.residual, self.mlp = made
        self.shared = heads != kv_heads

    def attend(self, number: int, query: Tensor, key_pre: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[B,1,H,D]``; writes the new token to the layer's cache first."""
        if self.method.sals:
            layer = self.layers[number]
            layer.query, layer.key_pre, layer.key, layer.value = query, key_pre, key, value
            return layer.step()
        keys, values = self.caches[number]
        keys.index_copy_(2, self.slot, key.transpose(1, 2))
        values.index_copy_(2, self.slot, value.transpose(1, 2))
        with _kernel(self.method.kernel):
            out = functional.scaled_dot_product_attention(query.transpose(1, 2), keys, values, enable_gqa=self.shared)
        return out.transpose(1, 2)

    def step(self) -> Tensor:
        """One decode step of all layers; with ``whole``, from token to token."""
        x = self.embedding[self.token].unsqueeze(1) if self.whole else self.x
        if self.method.sals:
            names = ("cos", "sin", "block_cos", "block_sin", "ring_slots")
            rows = [self.rows[n] for n in names]
            torch.ops.sals.record_rows(*rows, self.cos[:, :, 0], self.sin[:, :, 0], self.slot[None])
        for number, w in enumerate(self.weights):
            query = [w.query] if w.down is None or w.up is None else [w.down, w.up]
            operands = self.project(x, w.norm, query, w.key, w.value, self.cos, self.sin)
            x = self.residual(x, self.attend(number, *operands), w.output)
            if self.whole:
                x = self.mlp(x, w.norm_mlp, w.gate_up, w.mlp_down)
        if self.whole:
            normal = functional.rms_norm(x, (x.shape[-1],), None, 1e-5)
            self.token.copy_(functional.linear(normal[:, 0], self.head).argmax(-1))
        return x

    def time(self, repeats: int = 5) -> float:
        """Microseconds of one step: median."""
        if self.x.is_cuda:
            return time_graph([self.step], replays=20)
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            self.step()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times[1:])


@contextmanager
def _kernel(name: str) -> Iterator[None]:
    """One backend of ``scaled_dot_product_attention``; ``""``: PyTorch's own choice."""
    if not name:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel({"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[name]):
        yield


def methods_for(query_rank: int, device: torch.device) -> list[Method]:
    """Dense with each of its kernels, then the figure's two lines."""
    kernels = ("cudnn", "flash") if device.type == "cuda" else ("",)
    dense = [Method("dense", sals=False, kernel=k) for k in kernels]
    return [*dense, Method("full-rank Q"), Method(f"low-rank Q = {query_rank}", query_rank)]


def measure_point(
    shape: str,
    method: Method,
    weights: Sequence[Weights],
    batch: int,
    tokens: int,
    budget: int,
    device: torch.device,
    whole: bool,
) -> Point:
    """Time and memory of one method at one length. Running out of memory is a result, too."""
    chosen = [w if method.query_rank else Weights(*list(vars(w).values())[:8]) for w in weights]
    point = Point(method.name, tokens, batch, 0.0, extra={"kernel": method.kernel} if method.kernel else {})
    try:
        decoder = Decoder(shape, method, chosen, batch, tokens, budget, device, whole)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        point.us = decoder.time()
        point.peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not method.kernel:
            raise  # one of dense attention's kernels may not run here; our own must
        point.error = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    decoder = None  # type: ignore[assignment]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return point


def largest_batch(
    shape: str, method: Method, layers: int, tokens: int, budget: int, memory: int, device: torch.device, weights: int
) -> tuple[int, int]:
    """``(batch, bytes)``: the most sequences whose caches fit ``memory`` bytes beside ``weights`` and the workspace,
    and the bytes that they take in all. 0 where not even one fits.
    """
    preset = GEOMETRY[shape]
    one = layers * method.cache_bytes(preset, tokens, budget)
    fixed = weights + WORKSPACE[device.type]
    if method.sals:  # bases, and rotary rows with their block means, which all layers share
        fixed += layers * 2 * 2 * preset.joint * preset.rank + 2 * tokens * preset.head_dim * 2
    batch = max(0, (memory - fixed) // one)
    return batch, fixed + batch * one


def speedups(
    shape: str,
    lengths: Sequence[int],
    memory: int,
    query_rank: int,
    batch: int,
    budget: int,
    device: torch.device,
    advance: Advance,
    layers: int | None = None,
) -> dict[str, Any]:
    """The record of figure 3: points of both panels, and speed-ups over the faster dense kernel."""
    hidden, _, depth, _, _, vocabulary = SHAPES[shape]
    depth = layers or depth
    weights = [Weights.random(shape, query_rank, device) for _ in range(depth)]
    total = sum(w.nbytes for w in weights) + 2 * 2 * vocabulary * hidden
    factored = sum(w.down.nbytes + w.up.nbytes for w in weights if w.down is not None and w.up is not None)
    block: list[Point] = []
    serving: list[Point] = []
    preset = GEOMETRY[shape]
    for tokens in lengths:
        # As many layers as one pass must read, so that nothing of the last pass is left in the L2 cache.
        touched = batch * tokens * preset.score_rank + 2 * preset.joint * preset.rank * 2
        copies = min(depth, max(2, int(COLD_BYTES // touched) + 1)) if device.type == "cuda" else 1
        for method in methods_for(query_rank, device):
            point = measure_point(shape, method, weights[:copies], batch, tokens, budget, device, whole=False)
            point.us /= copies
            block.append(point)
            held = total if method.query_rank else total - factored
            fits, size = largest_batch(shape, method, depth, tokens, budget, memory, device, held)
            if fits == 0:
                serving.append(Point(method.name, tokens, 0, 0.0, size, error="not even one sequence fits the memory"))
            else:
                one = method.cache_bytes(preset, tokens, budget) * depth
                for _ in range(3):  # activations grow with the batch: where the allocator needed more, fewer fit
                    point = measure_point(shape, method, weights, fits, tokens, budget, device, whole=True)
                    # The factors of a method that does not use them are resident all the same, but not its own.
                    point.peak -= 0 if method.query_rank or not point.peak else factored
                    point.bytes = size
                    if point.peak <= memory:
                        break
                    fewer = max(1, fits - -(-(point.peak - memory) // one))
                    size, fits = size - (fits - fewer) * one, fewer
                if point.peak > memory:
                    point.error = f"the allocator's peak of {point.peak} bytes exceeds the budget of {memory}"
                serving.append(point)
            last = serving[-1]
            advance(
                f"{tokens} tokens, {method.name} {method.kernel}: {block[-1].us:.0f} µs a block; "
                f"batch {last.batch}, {last.us / 1e3:.2f} ms a step, {last.rate:.1f} tokens/s {last.error}"
            )
    return {
        "figure": "speed-up",
        "shape": shape,
        "layers": depth,
        "preset": asdict(preset),
        "query_rank": query_rank,
        "batch": batch,
        "budget": budget,
        "memory_bytes": memory,
        "weight_bytes": total - factored,
        "factor_bytes": factored,
        "block": [asdict(p) for p in block],
        "serving": [asdict(p) | {"tokens_per_s": p.rate} for p in serving],
        "block_speedup": _ratios(block),
        "serving_speedup": _ratios(serving),
    }


def _ratios(points: Sequence[Point]) -> dict[str, dict[int, float]]:
    """Tokens per second of each method over the best dense, by length; lengths that lack either are left out."""
    best: dict[int, float] = {}
    for point in points:
        if point.method == "dense" and not point.error:
            best[point.tokens] = max(best.get(point.tokens, 0.0), point.rate)
    result: dict[str, dict[int, float]] = {}
    for point in points:
        if point.method != "dense" and not point.error and point.tokens in best:
            result.setdefault(point.method, {})[point.tokens] = point.rate / best[point.tokens]
    return result


# ---- pictures --------------------------------------------------------------------------------------------------------


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("sals figures needs matplotlib: pip install 'sals-compile[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _made_on(about: dict[str, str]) -> str:
    how = "" if "triton" in about else ", operators uncompiled"
    return f"{about['device']}{how}, torch {about['torch']}, {about['date']}"


def _label(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def plot_rotary(record: dict[str, Any], path: Path) -> None:
    """Figure 2: tokens in the two leading directions before and after, cumulative variance, and rank by layer."""
    pyplot = _pyplot()
    layers, shown, about = record["layers"], record["shown"], record["environment"]
    layer = layers[shown]
    figure, panels = pyplot.subplots(2, 2, figsize=(9.5, 7.6), layout="constrained")
    for axes, when in zip(panels[0], ("before", "after"), strict=True):
        part = layer[when]
        x, y = zip(*part["points"], strict=True)
        dots = axes.scatter(x, y, c=range(len(x)), s=3, cmap="viridis")
        share = part["leading_two"] / part["total_variance"]
        axes.set_title(f"keys {when} the rotary embedding\n{share:.0%} of the variance in two directions", fontsize=10)
        axes.set_xlabel("first principal direction (key units)")
        axes.set_ylabel("second (key units)")
        axes.set_aspect("equal", "datalim")
    figure.colorbar(dots, ax=panels[0][1], label="position in the text (tokens)")
    curves, ranks = panels[1]
    for color, when in (("C0", "before"), ("C1", "after")):
        variances = torch.tensor(layer[when]["variances"], dtype=torch.float64)
        kept = (variances.cumsum(0) / variances.sum()).tolist()
        rank = layer[when]["rank_90"]
        curves.plot(range(1, len(kept) + 1), kept, color=color, label=f"{when}: rank {rank} for 90 %")
        curves.plot([rank], [kept[rank - 1]], "o", color=color)
        ranks.plot(range(len(layers)), [la[when]["rank_90"] for la in layers], "o-", ms=3, color=color, label=when)
    curves.axhline(0.9, color="0.6", linestyle=":")
    curves.set_xlabel("directions kept")
    curves.set_ylabel("share of the variance kept")
    curves.set_ylim(0, 1.02)
    curves.set_title(f"layer {shown}", fontsize=10)
    curves.legend(loc="lower right", fontsize=9)
    ranks.axvline(shown, color="0.8", zorder=0)
    ranks.set_xlabel("layer")
    ranks.set_ylabel(f"rank for 90 % of the variance, of {record['width']}")
    ranks.set_ylim(0)
    ranks.set_title(f"every layer: higher after in {record['raised']} of {len(layers)}", fontsize=10)
    ranks.legend(fontsize=9)
    figure.suptitle(
        f"Rotary embedding and PCA of keys: {record['model']}, {record['tokens']} tokens of prose, "
        f"layer {shown}\n{about['device']}, torch {about['torch']}, {about['date']}",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_speedups(record: dict[str, Any], path: Path) -> None:
    """Figure 3: panel (a) one attention block, panel (b) a whole model in fixed memory."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(10.5, 4.6), layout="constrained")
    lengths = sorted({p["tokens"] for p in record["block"]})
    memory = record["memory_bytes"] / (1 << 30)
    titles = {
        "block": f"(a) one attention block with projections, batch {record['batch']}",
        "serving": f"(b) whole model ({record['layers']} layers), largest batch in {memory:g} GiB",
    }
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for marker, (method, ratios) in zip("ox", record[f"{key}_speedup"].items(), strict=False):
            at = sorted(ratios)
            axes.plot([lengths.index(n) for n in at], [ratios[n] for n in at], marker=marker, label=f"SALS, {method}")
        axes.axhline(1, color="0.5", linestyle=":", label="dense")
        axes.set_xticks(range(len(lengths)), [_label(n) for n in lengths])
        axes.set_xlabel("cached tokens")
        axes.set_ylabel("decode speed-up over dense attention (×)")
        axes.set_ylim(0)
        axes.set_xlim(-0.4, len(lengths) - 0.6)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9, loc="upper left")
    top = panels[1].get_ylim()[1]
    panels[1].set_ylim(0, top * 1.12)
    for number, tokens in enumerate(lengths):
        batches = {p["method"]: p["batch"] for p in record["serving"] if p["tokens"] == tokens}
        text = f"B {batches.get('dense', 0)}|{batches.get('full-rank Q', 0)}"
        panels[1].annotate(text, (number, 0), (0, 3), textcoords="offset points", ha="center", fontsize=7, color="0.3")
    panels[1].annotate(
        "B: batch dense | SALS", (1, 0), (-4, 14), xycoords="axes fraction", textcoords="offset points", ha="right",
        fontsize=7, color="0.3",
    )  # fmt: skip
    figure.suptitle(
        f"Speed-up against context length: {record['shape']} shape, {record['budget']} tokens attended, "
        f"key rank {record['preset']['rank']}\n{_made_on(record['environment'])}",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def table(record: dict[str, Any]) -> Any:
    """Figure 3 as a rich table."""
    from rich.table import Table

    shown = Table(title=f"{record['shape']}, {record['layers']} layers ({record['environment']['device']})")
    for column in ("tokens", "method", "block µs", "×", "batch", "GiB", "ms/step", "tokens/s", "×"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    for block, serving in zip(record["block"], record["serving"], strict=True):
        ratio = [record[k].get(block["method"], {}).get(block["tokens"]) for k in ("block_speedup", "serving_speedup")]
        times = [f"{r:.2f}" if r else "" for r in ratio]
        kernel = block["extra"].get("kernel", "")
        size = serving["peak"] or serving["bytes"]
        shown.add_row(
            str(block["tokens"]),
            f"{block['method']} {kernel}".strip(),
            block["error"][:40] or f"{block['us']:.1f}",
            times[0],
            str(serving["batch"]),
            f"{size / (1 << 30):.2f}",
            serving["error"][:40] or f"{serving['us'] / 1e3:.2f}",
            f"{serving['tokens_per_s']:.1f}",
            times[1],
        )
    return shown


# ---- the command -----------------------------------------------------------------------------------------------------


def _write(record: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")


def _figure_1(args: argparse.Namespace, device: torch.device, about: dict[str, str], advance: Advance) -> list[Any]:
    on_gpu = device.type == "cuda"
    preset = PRESETS["mha"] if on_gpu else modules.TINY
    lengths = modules.GPU_LENGTHS if on_gpu else modules.CPU_LENGTHS
    batch, budget = (8, 512) if on_gpu else (1, 256)
    rows: list[modules.Row] = []
    for tokens in lengths:
        rows += modules.measure(preset, batch, tokens, budget, device)
        advance(f"{tokens} tokens")
    record = modules.as_record(rows, about, preset, batch, budget)
    _write(record, args.out / "figure1_modules.json")
    title = f"{preset.name}, batch {batch}, rank {preset.rank}, {budget} tokens attended"
    modules.plot(rows, args.out / "figure1_modules.png", f"Time per module: {title}\n{_made_on(about)}")
    return [modules.table(rows, about, title)]


def _figure_2(args: argparse.Namespace, device: torch.device, about: dict[str, str], advance: Advance) -> list[Any]:
    from . import models

    model, tokenizer = models.load(args.model, dtype=torch.float32)
    tokens = tokenizer(models.english_text(), return_tensors="pt", verbose=False).input_ids[:, : args.tokens]
    advance("model loaded")
    keys = observed_keys(model.to(device), tokens.to(device))
    shown = len(keys) // 2 if args.layer is None else args.layer
    if not 0 <= shown < len(keys):
        raise ValueError(f"--layer {shown}: the model has layers 0 to {len(keys) - 1}")
    record = rotary_and_pca(keys, shown, lambda _: None) | {"model": args.model, "environment": about}
    _write(record, args.out / "figure2_rotary_pca.json")
    plot_rotary(record, args.out / "figure2_rotary_pca.png")
    advance("keys analysed")
    before, after = (statistics.mean(la[w]["rank_90"] for la in record["layers"]) for w in ("before", "after"))
    return [
        f"rank for 90 % of the variance, of {record['width']}, mean of {len(keys)} layers: {before:.1f} before the "
        f"rotary embedding, {after:.1f} after; higher after in {record['raised']}"
    ]


def _figure_3(args: argparse.Namespace, device: torch.device, about: dict[str, str], advance: Advance) -> list[Any]:
    on_gpu = device.type == "cuda"
    with torch.no_grad():
        record = speedups(
            args.shape or ("llama-2-7b" if on_gpu else "smollm2-135m"),
            args.lengths or (GPU_LENGTHS if on_gpu else CPU_LENGTHS),
            int((args.memory_gib or (40 if on_gpu else 0.625)) * (1 << 30)),
            args.query_rank or (512 if on_gpu else 128),
            args.batch or (8 if on_gpu else 1),
            512,
            device,
            advance,
        )
    record["environment"] = about
    _write(record, args.out / "figure3_speedup.json")
    plot_speedups(record, args.out / "figure3_speedup.png")
    return [table(record)]


FIGURES = {1: _figure_1, 2: _figure_2, 3: _figure_3}


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(
        prog="sals figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="where PNG and JSON go; made if missing")
    made.add_argument("--only", type=int, nargs="+", choices=sorted(FIGURES), default=sorted(FIGURES))
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--model", default="smollm2", help="figure 2: as for `sals explain`, language models only")
    made.add_argument("--tokens", type=int, default=2048, help="figure 2: tokens of prose")
    made.add_argument("--layer", type=int, help="figure 2: the layer drawn (default: the middle one)")
    made.add_argument("--shape", choices=sorted(GEOMETRY), help="figure 3: llama-2-7b on a GPU, smollm2-135m on a CPU")
    made.add_argument("--lengths", type=int, nargs="+", help="figure 3: cached tokens, multiples of 128 over 512")
    made.add_argument("--memory-gib", type=float, help="figure 3 (b): 40 on a GPU, 0.625 on a CPU")
    made.add_argument("--query-rank", type=int, help="figure 3: 512 on a GPU, 128 on a CPU")
    made.add_argument("--batch", type=int, help="figure 3 (a): 8 on a GPU, 1 on a CPU")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``sals figures``. Returns the exit code: 0, or 2 for a bad argument."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    arguments = parser()
    args = arguments.parse_args(argv)
    _pyplot()  # before minutes of measuring
    if args.lengths and any(n % 128 or n <= 512 for n in args.lengths):
        arguments.error(f"--lengths {args.lengths}: multiples of 128, longer than the 512 tokens attended")
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    about = modules.environment(device)
    shown: list[Any] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    steps = {
        1: len(modules.GPU_LENGTHS if device.type == "cuda" else modules.CPU_LENGTHS),
        2: 2,
        3: len(args.lengths or (GPU_LENGTHS if device.type == "cuda" else CPU_LENGTHS)) * len(methods_for(1, device)),
    }
    with Progress(*columns, console=Console(stderr=True)) as bar:
        for number in args.only:
            task = bar.add_task(f"figure {number}", total=steps[number])

            def advance(text: str, task: Any = task, number: int = number) -> None:
                bar.update(task, advance=1, description=f"figure {number}: {text[:60]}")
                if not bar.console.is_terminal:  # a log shows no bar
                    print(f"figure {number}: {text}", file=sys.stderr, flush=True)

            shown += FIGURES[number](args, device, about, advance)
    console = Console(width=150 if not sys.stdout.isatty() else None)
    for item in shown:
        console.print(item)
    console.print(f"written to {args.out}: " + ", ".join(sorted(p.name for p in args.out.glob("figure*"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
