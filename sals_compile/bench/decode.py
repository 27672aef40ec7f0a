"""``sals bench decode``: end-to-end decode speed and memory, dense beside SALS, in one run.

The model is a Llama of the named shape with random weights (speed does not depend on their values); both systems decode
greedily through ``model.forward`` with the same harness. *Dense* is ``torch.compile`` (Inductor) over a ``StaticCache``
with CUDA graphs; *sals* is ``backend="sals"`` over a ``SalsCache``, which has no dense keys and values. A cache is
filled with random state to ``--at``'s context. *Ideal dense* is all weight and KV bytes at the copy bandwidth measured
in the same run.

``--memory-gib`` measures serving instead: per context the largest batch that each system fits into that much device
memory, enforced by the allocator, and its tokens per second.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..config import SalsConfig
from ..report import compiled_reports

#: Untimed steps: compilation, warm-up, CUDA graph recording.
WARM_UP = 6

#: hidden, intermediate, layers, heads, KV heads, vocabulary
SHAPES = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256),
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152),
    "tiny": (256, 512, 2, 4, 2, 1000),
}


def build(shape: str, layers: int | None, context: int, device: str, dtype: torch.dtype) -> Any:
    """A Llama of the named shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, depth, heads, kv_heads, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=context + 1024,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def dense_cache(model: Any, batch: int, capacity: int, context: int) -> Any:
    """A static cache that holds ``context`` random tokens."""
    from transformers import StaticCache

    c = model.config
    cache = StaticCache(config=c, max_cache_len=capacity)
    dim = c.hidden_size // c.num_attention_heads
    cache.early_initialization(batch, c.num_key_value_heads, dim, model.dtype, model.device)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(context)
    return cache


def sals_cache(forward: Any, model: Any, batch: int, capacity: int, context: int, budget: int) -> Any:
    """A ``SalsCache`` of ``context`` random tokens, after a prompt just longer than the budget made its bases."""
    from ..integrations.transformers import SalsCache

    cache = SalsCache(model.config, capacity, device=model.device)
    prompt = torch.randint(0, model.config.vocab_size, (batch, budget + 8), device=model.device)
    forward(prompt, past_key_values=cache, logits_to_keep=1)
    state = cache.state
    if state.phase != "latent":
        raise RuntimeError("the model did not go sparse: " + str(compiled_reports()[-1]))
    positions = torch.arange(context, device=model.device)[None]
    cos, sin = model.model.rotary_emb(torch.empty(1, dtype=model.dtype, device=model.device), positions)
    for rows in state.rows:
        tensors = (rows.cos, rows.sin, rows.block_cos, rows.block_sin, rows.ring_slots)
        torch.ops.sals.record_rows(*tensors, cos, sin, positions)
        rows.hold_last(context)
    for latents in state.latents.values():
        if latents.codes.dtype == torch.int8:
            latents.codes.random_(-127, 128)
            latents.scales.fill_(0.02)
        if latents.value_codes.dtype == torch.uint8:
            latents.value_codes.random_(0, 256)
            latents.value_scales.uniform_(-0.1, 0.1)
        latents.ring_key.normal_()
        latents.ring_value.normal_()
    for buffers in state.kept.values():
        for tensor in buffers.values():
            tensor.normal_()
    state.set_length(context)
    return cache


def time_steps(forward: Any, model: Any, cache: Any, batch: int, steps: int) -> list[float]:
    """Seconds of each greedy decode step after warm-up.

    On a GPU between the ends of successive steps, none of which is waited for: the next token never leaves the device.
    """
    token = torch.randint(0, model.config.vocab_size, (batch, 1), device=model.device)
    gpu = model.device.type == "cuda"
    ends: list[Any] = []
    for step in range(steps + WARM_UP):
        token = forward(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        if step >= WARM_UP - 1:
            if gpu:
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record()
            else:
                ends.append(time.perf_counter())
    if gpu:
        torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 if gpu else b - a for a, b in pairwise(ends)]


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a large copy, read and written both counted (a GPU only; 0 elsewhere)."""
    if not device.startswith("cuda"):
        return 0.0
    source = torch.empty(1 << 30, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times)


@torch.no_grad()
def run(
    shape: str,
    batch: int,
    context: int,
    *,
    layers: int | None = None,
    steps: int = 32,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    systems: Sequence[str] = ("dense", "sals"),
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One shape at one batch and context: tokens/s, peak memory and KV bytes of each system.

    Returns a dictionary ready for JSON. A system that runs out of memory has ``error`` instead of figures.
    """
    model = build(shape, layers, context, device, dtype)
    weights = sum(p.nbytes for p in model.parameters())
    c = model.config
    per_token = (
        2 * c.num_hidden_layers * c.num_key_value_heads * (c.hidden_size // c.num_attention_heads) * dtype.itemsize
    )
    result: dict[str, Any] = {
        "shape": shape,
        "layers": c.num_hidden_layers,
        "batch": batch,
        "context": context,
        "weight_bytes": weights,
        "dense_kv_bytes": per_token * batch * context,
        "systems": {},
    }
    bandwidth = copy_bandwidth(device)
    if bandwidth:
        ideal = (weights + per_token * batch * context) / bandwidth
        result |= {"copy_bandwidth": bandwidth, "ideal_dense_tokens_per_s": batch / ideal}
    for name in systems:
        result["systems"][name] = measure(name, model, batch, context, steps, options or {})
    return result


def measure(name: str, model: Any, batch: int, context: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Speed and memory of one system at one point, its cache freed on return; ``{"error": ...}`` when out of memory."""
    gpu = model.device.type == "cuda"
    torch._dynamo.reset()
    compiled_reports().clear()
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return _measure(name, model, batch, context, steps, options, gpu)
    except torch.OutOfMemoryError as failure:
        return {"error": f"out of memory: {str(failure).splitlines()[0]}"}


def _measure(
    name: str, model: Any, batch: int, context: int, steps: int, options: dict[str, Any], gpu: bool
) -> dict[str, Any]:
    capacity = -(-(context + steps + WARM_UP + 1) // 128) * 128
    if name == "dense":
        forward = torch.compile(model.forward, mode="reduce-overhead" if gpu else None)
        cache = dense_cache(model, batch, capacity, context)
        state_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    else:
        chosen = options | ({"cudagraphs": True} if gpu else {})
        forward = torch.compile(model.forward, backend="sals", options=chosen)
        cache = sals_cache(forward, model, batch, capacity, context, SalsConfig.from_options(chosen).budget)
        state_bytes = cache.nbytes()
    seconds = time_steps(forward, model, cache, batch, steps)
    return {
        "tokens_per_s": batch / statistics.median(seconds),
        "ms_per_step": 1e3 * statistics.median(seconds),
        "kv_bytes": state_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
    }


@torch.no_grad()
def serve(
    shape: str,
    contexts: Sequence[int],
    memory_gib: float,
    *,
    layers: int | None = None,
    steps: int = 16,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    systems: Sequence[str] = ("dense", "sals"),
    options: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Tokens/s of each system at the largest batch that fits ``memory_gib`` of device memory, per context.

    On a GPU the allocator refuses more than that (weights, caches, activations and CUDA graphs together), and the batch
    shrinks until the run succeeds; elsewhere the batch is computed from weights and KV bytes alone.
    """
    gpu = device.startswith("cuda")
    limit = int(memory_gib * 2**30)
    model = build(shape, layers, max(contexts), device, dtype)
    weights = sum(p.nbytes for p in model.parameters())
    if gpu:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.get_device_properties(0).total_memory))
    rows = []
    for context in contexts:
        row: dict[str, Any] = {"shape": shape, "context": context, "memory_gib": memory_gib, "systems": {}}
        for name in systems:
            single = measure(name, model, 1, context, 1, options or {})
            batch = 0 if "error" in single else max(1, int((limit - weights) // single["kv_bytes"]))
            entry = single
            while batch >= 1:
                entry = measure(name, model, batch, context, steps, options or {})
                if "error" not in entry:
                    break
                batch = min(batch - 1, int(0.94 * batch))
            row["systems"][name] = entry | {"batch": batch}
        rows.append(row)
        show(row)
    return rows


def describe_machine(device: str) -> dict[str, str]:
    """Hardware, versions and date, for the record."""
    import transformers

    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of ``sals bench decode``."""
    parser = argparse.ArgumentParser(prog="sals bench decode", description=__doc__)
    parser.add_argument("--shape", default="llama-3-8b", choices=SHAPES)
    parser.add_argument("--at", default="8x4096,8x32768", help="comma-separated BATCHxCONTEXT")
    parser.add_argument("--memory-gib", help="comma-separated: serve at these memory limits, over --contexts")
    parser.add_argument("--contexts", default="1024,4096,8192,32768")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="an option of SalsConfig")
    parser.add_argument("--systems", default="dense,sals")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    options = {k: json.loads(v) for k, v in (o.split("=", 1) for o in args.option)}
    shared: dict[str, Any] = {
        "layers": args.layers,
        "steps": args.steps,
        "device": args.device,
        "options": options,
        "systems": args.systems.split(","),
    }
    rows = []
    if args.memory_gib:
        contexts = [int(c) for c in args.contexts.split(",")]
        for limit in args.memory_gib.split(","):
            rows += serve(args.shape, contexts, float(limit), **shared)
    for point in [] if args.memory_gib else args.at.split(","):
        batch, context = map(int, point.split("x"))
        rows.append(run(args.shape, batch, context, **shared))
        show(rows[-1])
    report = {"machine": describe_machine(args.device), "options": options, "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))
    return 0


def show(row: dict[str, Any]) -> None:
    """A line for each system of a row that is done."""
    for name, entry in row["systems"].items():
        figures = entry.get("error") or f"{entry['tokens_per_s']:9.1f} tok/s  {entry['ms_per_step']:8.2f} ms/step"
        if "kv_bytes" in entry:
            figures += f"  KV {entry['kv_bytes'] / 2**30:.3f} GiB"
        at = f"{entry.get('batch', row.get('batch'))}x{row['context']}"
        limit = f"  {row['memory_gib']:g} GiB" if "memory_gib" in row else ""
        print(f"{row['shape']}{limit}  {at}  {name:6} {figures}", flush=True)
