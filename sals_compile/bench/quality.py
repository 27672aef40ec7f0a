"""`sals bench quality`: what SALS costs in quality on real text, through the compiled path, against the bytes it keeps.

How it is measured. A window of text that the calibration has not seen is prefilled once, dense, through the compiled
model: that gives the reference distributions and the exact keys and values. For each method and each depth the compiled
decode graph then starts from those tokens (its own import into latents) and is fed the true next tokens, ``--chunk`` at
a call (a call of up to ``decode_tokens`` tokens is a decode call, every token selects for itself); what it predicts is
compared with the reference at the same positions. Its own approximations accumulate in what it caches, as in use.

Dimensions: ``P`` positions scored, ``V`` vocabulary.

=============  ======================================================================================================
nll            mean over positions of (SALS's loss on the true token minus the dense model's), nats
kl             mean KL(dense ‖ SALS) of the next-token distributions, nats
top1           share of positions where both have the same most likely token
top_p          mean Jaccard overlap of the two nucleus sets (smallest sets with probability 0.9)
retained       softmax mass (exact keys) of the attended tokens, mean over heads, sparse layers and positions
recall         share of the exact top-k (by softmax mass summed over heads) among the tokens chosen by score
bytes          KV bytes per token over all layers, with layers left dense, scales, rings, rotary rows and block means,
               as stored for a model of a 16-bit type
key_share      bytes of latents and their scales over the bytes of dense keys, of a sparse layer
layer_ratio    dense KV bytes over bytes of latents and value codes with their scales, of a sparse layer: the paper's
               count, which leaves out rings, rotary rows and dense layers
=============  ======================================================================================================

Ablations replace the selection by another one in the very same graph: ``oracle`` (exact softmax mass), ``random`` and
``recent`` (only sinks and the last tokens). They and ``retained`` need ``--lowering eager``.

``--stateless`` measures a whole-sequence forward without a cache, where a block of queries shares one selection, by
the rule of the operator and by others (``--rules``).

    sals bench quality --json quality.json --plot quality.png
    sals bench quality --rows all --windows 2
    sals bench quality --rows default,paper-25 --depths 2560,3584 --positions 256
    sals bench quality --row "mine:rank=0.25,budget=1024" --text test.txt --calibration-text train.txt
    sals bench quality --rows "" --stateless --rules all
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ..backend import load_calibration, registry_for
from ..cache import AdoptedCache, Latents, Rows, buffer_key
from ..calibrate import Calibration, calibrate
from ..config import OptionError, SalsConfig
from ..kernels import reference
from ..kernels.index_expr import Modifier, evaluate
from ..passes.plan import auto_skip
from ..report import GraphReport, compiled_reports
from . import models

#: Layers that the paper, and with it every row unless it says otherwise, leaves dense.
SKIP = (0, 1, -1)

#: Share of probability in a nucleus set.
NUCLEUS = 0.9

#: Every row: its method (a line of the plot) and its options. ``selection`` and ``values`` are not options of the
#: compiler: they name an ablation. ``values="min-max"`` spreads the levels of values from the minimum to the maximum of
#: 32 dims, as the paper's method was first measured; ours fit four levels, and share the scale of 16 by 64.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("sals", {}),
    "paper-25": ("paper", {"preset": "paper-25"}),
    "paper-12.5": ("paper", {"preset": "paper-12.5"}),
    "paper-25-plain": ("paper, min-max values", {"preset": "paper-25", "values": "min-max"}),
    "paper-12.5-plain": ("paper, min-max values", {"preset": "paper-12.5", "values": "min-max"}),
    "compact": ("sals, compact", {"preset": "compact"}),
    "rank-1/4": ("sals", {"rank": 0.25}),
    "rank-1/8": ("sals", {"rank": 0.125}),
    "max": ("sals, heads' maximum", {"head_score": "max"}),
    "sum": ("sals, heads' sum", {"head_score": "sum"}),
    "sum-1/4": ("sals, heads' sum", {"head_score": "sum", "rank": 0.25}),
    "score-1/4": ("sals, score rank 1/4", {"score_rank": 0.25}),
    "rope-free": ("sals, rope-free score", {"scoring": "rope_free"}),
    "pca": ("sals, pca basis", {"basis": "pca"}),
    "decoder-8": ("sals, int8 decoder", {"decoder_bits": 8}),
    "latent-16": ("sals, latents not quantised", {"latent_bits": 16}),
    "value-2": ("sals, 2-bit values", {"value_bits": 2}),
    "value-8": ("sals, 8-bit values", {"value_bits": 8}),
    "value-16": ("sals, values not quantised", {"value_bits": 16}),
    "no-hadamard": ("sals, values not rotated", {"value_transform": "none"}),
    "full-rank": ("sals, exact keys", {"rank": 1.0, "latent_bits": 16, "value_bits": 16}),
    "T-256": ("sals", {"budget": 256}),
    "T-1024": ("sals", {"budget": 1024}),
    "query-95": ("sals, low-rank queries", {"query_rank": 0.95}),
    "query-90": ("sals, low-rank queries", {"query_rank": 0.9}),
    "no-skip": ("sals, no layer dense", {"skip_layers": ()}),
    "auto-skip": ("sals, dense layers by calibration", {"skip_layers": "auto"}),
    "auto-budget": ("sals, budgets by calibration", {"budget": "auto"}),
    "oracle": ("oracle selection", {"selection": "oracle"}),
    "oracle-exact": (
        "oracle selection, exact keys",
        {"selection": "oracle", "rank": 1.0, "latent_bits": 16, "value_bits": 16},
    ),
    "random": ("random selection", {"selection": "random"}),
    "recent": ("recent tokens only", {"selection": "recent"}),
}

DEFAULT_ROWS = (
    "default", "paper-25", "paper-12.5", "compact", "sum", "rank-1/4", "rope-free", "pca", "value-16", "T-1024",
    "oracle", "random", "recent",
)  # fmt: skip

#: Retained mass and recall are measured at every so many decode calls.
INSPECT_EVERY = 4

SELECTIONS = ("score", "oracle", "random", "recent")

#: How a block of queries without a cache may share one selection. From the approximate logits: ``mean`` of all queries
#: and heads; ``head-max`` and ``head-mass`` (softmax) of each head's mean query; ``run-max`` over the means of up to 16
#: runs of queries, heads summed; ``query-max`` over queries of the heads' sum; ``query-mass``, the softmax of every
#: query and head. From exact attention: ``oracle``. ``operator``: whatever ``sals::block_select`` does.
#: A mean forgets the query that differs, which retained mass hardly shows and KL does. The operator's is ``run-max``:
#: with a run a query (``query-max``) it would have four times the projections to write and read, most of what it costs.
BLOCK_RULES = (
    "operator", "mean", "run-max", "head-max", "head-mass", "query-max", "query-mass", "oracle", "random", "recent",
)  # fmt: skip


class QualityError(ValueError):
    """A measurement that cannot be made as asked. Says why, and the remedy."""


@dataclass
class Window:
    """A window of test text, prefilled once: what every row starts from.

    ``tokens [1, S]``; ``reference``: dense log-probabilities ``[P, V]`` fp32 by depth; ``keys``, ``values``: the exact
    dense buffers, one ``[1, N, S, D]`` a layer; ``adopted``: the rotary rows that the compiled prefill recorded;
    ``sites``: the layers' names.
    """

    name: str
    tokens: Tensor
    reference: dict[int, Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    adopted: AdoptedCache
    cache: Any
    sites: list[str]


@dataclass
class Result:
    """One row: means over windows, depths and positions (the table of this module's docstring)."""

    name: str
    method: str
    options: dict[str, Any]
    nll: float = 0.0
    kl: float = 0.0
    top1: float = 0.0
    top_p: float = 0.0
    retained: float | None = None
    recall: float | None = None
    bytes: float = 0.0
    dense_bytes: float = 0.0
    key_share: float = 0.0
    layer_ratio: float = 0.0
    positions: int = 0
    seconds: float = 0.0
    kl_by_depth: dict[str, float] = field(default_factory=dict)
    retained_by_layer: dict[str, float] = field(default_factory=dict)
    recall_by_layer: dict[str, float] = field(default_factory=dict)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def divergence(dense: Tensor, other: Tensor) -> Tensor:
    """``KL(dense ‖ other)`` of log-probabilities ``[P, V]``: ``[P]``, nats."""
    return (dense.exp() * (dense - other)).sum(-1)


def nucleus(log_probabilities: Tensor, share: float = NUCLEUS) -> Tensor:
    """The smallest sets of tokens with probability ``share``: ``[P, V]`` bool."""
    ordered, index = log_probabilities.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    return torch.zeros_like(index, dtype=torch.bool).scatter_(-1, index, before < share)


def compare(dense: Tensor, other: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The four distances between log-probabilities ``[P, V]``, by position; ``targets [P]`` are the true tokens."""
    first, second = nucleus(dense), nucleus(other)
    at = targets.unsqueeze(-1)
    return {
        "nll": (dense.gather(-1, at) - other.gather(-1, at)).squeeze(-1),
        "kl": divergence(dense, other),
        "top1": (dense.argmax(-1) == other.argmax(-1)).float(),
        "top_p": (first & second).sum(-1) / (first | second).sum(-1),
    }


def stored_bytes(report: GraphReport, width: int = 2) -> tuple[float, float, float, float]:
    """``(bytes, dense_bytes, key_share, layer_ratio)`` of a decode graph, floating activations ``width`` bytes wide.

    A quality run may compute in fp32 what a model in use stores in bf16; the storage counted is the latter's.
    """
    plans, groups, config = report._compiled.plans, report._compiled.groups, report.config
    total = dense = share = ratio = 0.0
    sparse = 0
    for plan in plans:
        site = plan.site
        if site.key_cache is None:
            continue
        whole = 2.0 * site.joint_width * width
        dense += whole
        if plan.action == "dense":
            total += whole
            continue
        capacity = site.key_cache.capacity
        latents = Latents.allocate(plan, 1, capacity, config, torch.device("meta"))

        def size(tensor: Tensor, exact: torch.dtype = site.dtype) -> float:
            return tensor.numel() * (width if tensor.dtype == exact else tensor.element_size())

        total += sum(size(t) for t in vars(latents).values()) / capacity
        slots = latents.codes.shape[1]  # whole blocks: a slot's bytes are those of any token
        keys = (size(latents.codes) + size(latents.scales)) / slots
        share += keys / (site.joint_width * width)
        ratio += whole / (keys + (size(latents.value_codes) + size(latents.value_scales)) / slots)
        sparse += 1
    for group in groups:
        site = plans[group.sites[0]].site
        assert site.key_cache is not None
        rows = Rows.allocate(site, 1, site.key_cache.capacity, config, torch.device("meta"))
        exact = (rows.cos.numel() + rows.sin.numel()) * width
        total += (exact + rows.block_cos.nbytes + rows.block_sin.nbytes + rows.ring_slots.nbytes) / (
            site.key_cache.capacity
        )
    return total, dense, share / max(sparse, 1), ratio / max(sparse, 1)


# ---- looking into the graph ------------------------------------------------------------------------------------------


class _Inspector(Interpreter):
    """Runs a rewritten decode graph (eager) and, at every site, measures the selection or replaces it.

    At ``sals::attend`` the exact softmax of every head is computed from the dense mirror and the exact ring: the mass
    of what is attended, and the overlap of what was chosen with the exact top-k. Under an ablation the chosen indices
    are replaced before they are attended.
    """

    def __init__(self, gm: GraphModule, report: GraphReport, selection: str, totals: dict[str, list[Tensor]]) -> None:
        super().__init__(gm)
        self.selection, self.totals = selection, totals
        plans = [p for p in report._compiled.plans if p.action == "sals"]
        attends = [n for n in gm.graph.nodes if n.target is torch.ops.sals.attend.default]
        self.sites = {
            n: (p.site.name, p.site.key_cache.buffer.name, p.site.key_cache.layout)
            for n, p in zip(attends, plans, strict=True)
            if p.site.key_cache is not None
        }
        # The buffers and the slots are read when attention runs, which may be after their last use in the graph.
        self.garbage_collect_values = False
        self.generator = torch.Generator().manual_seed(0)
        self.calls = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().run(*args, **kwargs)

    def run_node(self, n: Node) -> Any:
        if n not in self.sites or (self.selection == "score" and self.calls % INSPECT_EVERY != 1):
            return super().run_node(n)
        name, buffer, layout = self.sites[n]
        args = list(self.fetch_args_kwargs_from_env(n)[0])
        query, chosen, ring_key, ring_slots = args[0], args[1], args[6], args[8]
        scores = next(a for a in n.all_input_nodes if a.target is torch.ops.sals.score_select.default)
        slots = self.env[scores.args[7]]  # type: ignore[index]
        held = next(v for k, v in self.env.items() if k.op == "placeholder" and k.name == buffer)
        key = layout.to_roles(held).float().clone()  # [B,S,N,D]
        ring = ring_slots[0].long()
        key[:, ring[ring >= 0]] = ring_key[:, ring >= 0].float()
        mass = exact_mass(query, key, slots, float(args[16]))  # [B,L,H,S]
        ringed = torch.zeros(mass.shape[1], mass.shape[-1], dtype=torch.bool)
        ringed[:, ring[ring >= 0]] = True
        joint = mass.sum(2).masked_fill(ringed, -torch.inf)
        future = torch.arange(mass.shape[-1]) > slots[0].unsqueeze(-1)
        joint = joint.masked_fill(future, -torch.inf)
        count = chosen.shape[-1]
        best = reference.select(joint, count)
        chosen = args[1] = self._replaced(chosen, joint, best)
        attended = _as_set(chosen, mass.shape[-1]) | (ringed & ~future)
        kept = (mass * attended.unsqueeze(2)).sum(-1).mean()
        both = (_as_set(chosen, mass.shape[-1]) & _as_set(best, mass.shape[-1])).sum(-1).float()
        self.totals.setdefault(name, []).append(torch.stack((kept, (both / (best >= 0).sum(-1).clamp_min(1)).mean())))
        return n.target(*args)  # type: ignore[operator]

    def _replaced(self, chosen: Tensor, joint: Tensor, best: Tensor) -> Tensor:
        if self.selection == "oracle":
            return best
        if self.selection == "random":
            noise = torch.rand(joint.shape, generator=self.generator)
            return reference.select(torch.where(joint == -torch.inf, joint, noise), chosen.shape[-1])
        if self.selection == "recent":
            latest = torch.arange(joint.shape[-1], dtype=torch.float32).expand_as(joint)
            return reference.select(torch.where(joint == -torch.inf, joint, latest), chosen.shape[-1])
        return chosen


def exact_mass(query: Tensor, key: Tensor, slots: Tensor, scale: float) -> Tensor:
    """Causal softmax ``[B,L,H,S]`` of ``query [B,L,H,D]`` at ``slots [P,L]`` over exact rotated keys ``[B,S,N,D]``."""
    grouped = query.float().unflatten(2, (key.shape[2], -1))
    logits = torch.einsum("blngd,bsnd->blngs", grouped, key).flatten(2, 3) * scale
    future = torch.arange(key.shape[1]) > slots.unsqueeze(-1)
    return logits.masked_fill(future.unsqueeze(2), -torch.inf).softmax(-1)


def _as_set(indices: Tensor, size: int) -> Tensor:
    """``[..., k]`` indices (-1: none) as membership ``[..., size]``."""
    found = torch.zeros(*indices.shape[:-1], size + 1, dtype=torch.bool)
    found.scatter_(-1, torch.where(indices < 0, size, indices).long(), True)
    return found[..., :size]


@contextlib.contextmanager
def _lowering_to(operator: Any, make: Callable[[GraphModule], Interpreter]) -> Iterator[None]:
    """Graphs with ``operator`` in them, lowered within, run through the interpreter that ``make`` gives; others as they
    would."""
    from .. import runtime

    original = runtime.lower

    def lower(gm: GraphModule, *args: Any) -> Callable[[list[Any]], Any]:
        if not any(n.target is operator for n in gm.graph.nodes):
            return original(gm, *args)
        interpreter = make(gm)

        def call(inputs: list[Any]) -> Any:
            try:
                return interpreter.run(*inputs)
            finally:
                interpreter.env.clear()  # every row's graph stays known to the reports, with what this holds

        return call

    with mock.patch.object(runtime, "lower", lower):
        yield


def _inspecting(selection: str, totals: dict[str, list[Tensor]]) -> contextlib.AbstractContextManager[None]:
    """Decode graphs lowered within run through an :class:`_Inspector`."""
    return _lowering_to(
        torch.ops.sals.attend.default, lambda gm: _Inspector(gm, compiled_reports()[-1], selection, totals)
    )


@contextlib.contextmanager
def _plain_values() -> Iterator[None]:
    """Values quantised within as :data:`ROWS` says of ``"min-max"``."""

    def levels(grouped: Tensor) -> tuple[Tensor, Tensor]:
        return reference._levels(grouped.amin(-1), grouped.amax(-1), 3.0)

    def group(head_dim: int, bits: int = 4) -> int:
        return min(32, head_dim & -head_dim)

    with mock.patch.multiple(reference, _two_bit_levels=levels, value_group=group):
        yield


# ---- a window, and one row on it -------------------------------------------------------------------------------------


@torch.no_grad()
def prefill(model: Any, name: str, tokens: Tensor, depths: Sequence[int], positions: int) -> Window:
    """Run a window ``[1, S]`` once, dense, through the compiled model; keep what every row needs."""
    from transformers import StaticCache

    options = {"lowering": "eager", "budget": 32, "sinks": 1, "recents": 16}
    forward = torch.compile(model.forward, backend="sals", options=options, dynamic=False)
    cache = StaticCache(config=model.config, max_cache_len=tokens.shape[1])
    c = model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    cache.early_initialization(tokens.shape[0], c.num_key_value_heads, head_dim, model.dtype, model.device)
    wanted = torch.cat([torch.arange(d, d + positions) for d in depths]).to(tokens.device)
    logits = forward(tokens, past_key_values=cache, logits_to_keep=wanted).logits[0]
    parts = logits.float().log_softmax(-1).split(positions)
    adopted = registry_for(SalsConfig.from_options(options)).caches.get(cache.layers[0].keys)
    if adopted is None:
        raise QualityError(
            "no KV cache of this model was adopted, so there is nothing to measure: see `sals explain` for the reasons"
        )
    sites = [s.name for s in compiled_reports()[-1].sites]
    torch._dynamo.reset()
    return Window(
        name,
        tokens,
        dict(zip(depths, parts, strict=True)),
        [layer.keys.clone() for layer in cache.layers],
        [layer.values.clone() for layer in cache.layers],
        adopted,
        cache,
        sites,
    )


def start_at(window: Window, depth: int, config: SalsConfig) -> None:
    """Put the window's cache into the state of a dense prefill of ``depth`` tokens under ``config``.

    A prefill is dense and exact under every configuration and records the same rotary rows, so it is done once and its
    state (buffers, rows, count) is handed to each configuration's registry here.
    """
    registry, cache = registry_for(config), window.cache
    for layer, key, value in zip(cache.layers, window.keys, window.values, strict=True):
        layer.keys.copy_(key)
        layer.values.copy_(value)
        layer.cumulative_length.fill_(depth)
    active = active_layers(window, config)
    copies: dict[int, Rows] = {}
    rows_of = {}
    for layer in active:
        source = window.adopted.rows_of[buffer_key(layer.keys)]
        if id(source) not in copies:
            ring = torch.full((source.cos.shape[0], min(config.recents, layer.keys.shape[2])), -1, dtype=torch.int32)
            copies[id(source)] = Rows(
                source.cos.clone(),
                source.sin.clone(),
                source.block_cos.clone(),
                source.block_sin.clone(),
                ring.to(source.cos.device),
            )
        rows_of[buffer_key(layer.keys)] = copies[id(source)]
    keys, values = [layer.keys for layer in active], [layer.values for layer in active]
    forms = zip(window.cache.layers, window.adopted.rotary, strict=True)
    rotary = tuple(form for layer, form in forms if any(layer is a for a in active))
    adopted = AdoptedCache(keys, list(copies.values()), rows_of, rotary)
    adopted.tokens = depth
    adopted.record_versions([*keys, *values])
    for key in keys:
        registry.caches.set(key, adopted)


@torch.no_grad()
def decode(
    model: Any, forward: Callable[..., Any], window: Window, depth: int, positions: int, chunk: int, config: SalsConfig
) -> dict[str, Tensor]:
    """Teacher-forced decoding of ``positions`` tokens from ``depth``: the distances by position, each ``[P]``."""
    start_at(window, depth, config)
    found = []
    for start in range(depth, depth + positions, chunk):
        piece = window.tokens[:, start : min(start + chunk, depth + positions)]
        found.append(forward(piece, past_key_values=window.cache).logits[0].float().log_softmax(-1))
    adopted = registry_for(config).caches.get(active_layers(window, config)[0].keys)
    if adopted is None or adopted.phase != "sparse":
        reason = adopted.refused if adopted is not None else "its cache was not adopted"
        raise QualityError(f"decoding did not go sparse: {reason or 'fewer tokens than the budget are cached'}")
    targets = window.tokens[0, depth + 1 : depth + positions + 1]
    scored = len(targets)  # the window's last token has no successor
    return compare(window.reference[depth][:scored], torch.cat(found)[:scored], targets)


def active_layers(window: Window, config: SalsConfig) -> list[Any]:
    """The cache's layers that a configuration (resolved by ``load_calibration``) does not leave dense."""
    layers, capacity = window.cache.layers, window.tokens.shape[1]
    found = []
    for index, (layer, name) in enumerate(zip(layers, window.sites, strict=True)):
        budget = config.budget_by_site.get(name, config.budget)
        skipped = any(
            bool(auto_skip(name, index, len(layers), config, budget))
            if skip == "auto"
            else skip in ((index, index - len(layers)) if isinstance(skip, int) else name)
            for skip in config.skip_layers
        )
        if not skipped and budget < capacity:
            found.append(layer)
    if not found:
        raise QualityError("every layer is left dense, so there is nothing to measure: raise budget or lower auto_mass")
    return found


def measure(
    model: Any,
    windows: Sequence[Window],
    name: str,
    method: str,
    options: Mapping[str, Any],
    calibration: Calibration,
    positions: int,
    chunk: int,
    lowering: str,
    inspect: bool,
    step: Callable[[], None] = lambda: None,
) -> Result:
    """One row on every window and depth. ``step`` is called after each depth."""
    options = dict(options)
    selection = options.pop("selection", "score")
    if selection not in SELECTIONS:
        raise QualityError(f"selection={selection!r}: allowed are {', '.join(SELECTIONS)}")
    values = options.pop("values", "fitted")
    if values not in ("fitted", "min-max"):
        raise QualityError(f"values={values!r}: allowed are 'fitted', 'min-max'")
    if lowering != "eager" and (selection, values) != ("score", "fitted"):
        raise QualityError(f"row {name!r}: selection={selection!r}, values={values!r} need --lowering eager")
    shown = {"skip_layers": SKIP} | options
    full = shown | {"lowering": lowering}
    if full.get("basis") != "weights":
        full["calibration"] = calibration
    full["decode_tokens"] = max(chunk, 1)
    config = load_calibration(SalsConfig.from_options(full))
    totals: dict[str, list[Tensor]] = {}
    watched = lowering == "eager" and (inspect or selection != "score")
    ablated = {"selection": selection} if selection != "score" else {}
    ablated |= {"values": values} if values != "fitted" else {}
    result = Result(name, method, shown | ablated)
    sums: dict[str, list[Tensor]] = {}
    started = time.perf_counter()
    torch._dynamo.reset()
    forward = torch.compile(model.forward, backend="sals", options=full, dynamic=False)
    with contextlib.ExitStack() as stack:
        if watched:
            stack.enter_context(_inspecting(selection, totals))
        if values == "min-max":
            stack.enter_context(_plain_values())
        for window in windows:
            for depth in window.reference:
                found = decode(model, forward, window, depth, positions, chunk, config)
                for metric, value in found.items():
                    sums.setdefault(metric, []).append(value)
                result.kl_by_depth[f"{window.name}@{depth}"] = float(found["kl"].mean())
                step()
        counted = stored_bytes(compiled_reports()[-1])
    for metric, by_depth in sums.items():
        setattr(result, metric, float(torch.cat(by_depth).mean()))
    result.positions = sum(len(v) for v in sums["kl"])
    result.bytes, result.dense_bytes, result.key_share, result.layer_ratio = counted
    if totals:
        layers = {site: torch.stack(v).mean(0) for site, v in totals.items()}
        result.retained_by_layer = {site: float(v[0]) for site, v in layers.items()}
        result.recall_by_layer = {site: float(v[1]) for site, v in layers.items()}
        result.retained, result.recall = torch.stack(list(layers.values())).mean(0).tolist()
    result.seconds = time.perf_counter() - started
    return result


# ---- the whole -------------------------------------------------------------------------------------------------------


def corpora(text: Sequence[Path], calibration_text: Sequence[Path]) -> dict[str, tuple[str, str]]:
    """``{name: (calibration text, test text)}``. Files given replace prose and Python source; one file is halved."""
    if text:
        test = "\n\n".join(p.read_text() for p in text)
        if calibration_text:
            return {"text": ("\n\n".join(p.read_text() for p in calibration_text), test)}
        return {"text": (test[: len(test) // 2], test[len(test) // 2 :])}
    result = {}
    for name, whole in (("prose", models.english_text()), ("python", models.python_source())):
        result[name] = (whole[: int(len(whole) * 0.6)], whole[int(len(whole) * 0.6) :])
    return result


def windows_of(tokenizer: Any, text: str, length: int, count: int, name: str) -> list[Tensor]:
    """``count`` windows ``[1, length]``, evenly spaced over a text."""
    tokens = tokenizer(text, return_tensors="pt", verbose=False, add_special_tokens=False).input_ids
    if tokens.shape[1] < length * count:
        raise QualityError(
            f"the {name} text has {tokens.shape[1]} tokens, {count} windows of {length} were asked for: give a longer "
            "text, or lower --tokens or --windows"
        )
    stride = (tokens.shape[1] - length) // max(count - 1, 1)
    return [tokens[:, i * stride : i * stride + length] for i in range(count)]


def run(
    model: Any,
    tokenizer: Any,
    rows: Mapping[str, tuple[str, Mapping[str, Any]]],
    *,
    tokens: int = 4096,
    depths: Sequence[int] | None = None,
    positions: int = 128,
    windows: int = 1,
    chunk: int = 1,
    lowering: str = "eager",
    texts: Mapping[str, tuple[str, str]] | None = None,
    cross: bool = False,
    calibration_windows: int = 4,
    calibrations: Mapping[str, Calibration] | None = None,
    inspect: bool = True,
    progress: bool = True,
    done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Measure every row.

    Args:
        model, tokenizer: as :func:`sals_compile.bench.models.load` gives them.
        rows: ``{name: (method, options)}``; see :data:`ROWS`.
        tokens: length of a window.
        depths: tokens cached where decoding starts, ascending. Default: four, evenly spaced over the last half.
        positions: tokens decoded from each depth.
        windows: test windows of each corpus.
        chunk: tokens per decode call.
        lowering: of the decode graph.
        texts: ``{corpus: (calibration text, test text)}``. The first is tested on.
        cross: also measure the first row on the second corpus, calibrated on it and on the first.
        calibrations: made before, by corpus; what is missing is made from ``calibration_windows`` windows.
        inspect: measure retained mass and recall (eager only).
        done: called with each result as it comes.

    Raises:
        QualityError: a text too short, a depth outside the window, a row that cannot be measured so.
        OptionError: a bad option in a row.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    texts = corpora((), ()) if texts is None else texts
    depths = default_depths(tokens, positions) if depths is None else sorted(depths)
    if not depths or depths[0] < 1 or depths[-1] + positions > tokens:
        raise QualityError(
            f"depths {list(depths)} with {positions} positions do not fit a window of {tokens} tokens: "
            "every depth plus positions must be at most --tokens"
        )
    for name, (_, options) in rows.items():
        checked = {k: v for k, v in options.items() if k not in ("selection", "values")}
        budget = SalsConfig.from_options({"calibration": "to be made"} | checked).budget
        if budget != "auto" and depths[0] <= budget:
            raise QualityError(f"row {name!r}: depth {depths[0]} does not exceed its budget, decoding there is dense")
    known = dict(calibrations or {})
    names = list(texts)
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    plan = [(names[0], names[0], name, method, options) for name, (method, options) in rows.items()]
    if cross and len(names) > 1:
        first, (method, options) = next(iter(rows.items()))
        for corpus in (names[1], names[0]):
            plan.append((names[1], corpus, f"{first}, {corpus} -> {names[1]}", f"calibrated on {corpus}", options))
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("calibrate", total=len(plan) * len(depths) * windows)
        for corpus in dict.fromkeys(p[1] for p in plan):
            if corpus not in known:
                pieces = windows_of(tokenizer, texts[corpus][0], tokens, calibration_windows, f"{corpus} calibration")
                factored = any("query_rank" in options for *_, options in plan)
                known[corpus] = calibrate(model, pieces, progress=False, projections=factored)
        prepared: dict[str, list[Window]] = {}
        for tested, corpus, name, method, options in plan:
            if tested not in prepared:
                prepared.clear()
                bar.update(task, description=f"{tested}: prefill")
                cut = windows_of(tokenizer, texts[tested][1], tokens, windows, f"{tested} test")
                prepared[tested] = [prefill(model, f"{tested}{i}", w, depths, positions) for i, w in enumerate(cut)]
            bar.update(task, description=name)
            result = measure(
                model,
                prepared[tested],
                name,
                method,
                options,
                known[corpus],
                positions,
                chunk,
                lowering,
                inspect,
                lambda: bar.advance(task),
            )
            results.append(result)
            done(result)
    return results


def default_depths(tokens: int, positions: int) -> list[int]:
    """Four depths evenly spaced over the last half of a window, whose last token has no successor to score."""
    first, last = tokens // 2, tokens - positions - 1
    return [first + (last - first) * i // 3 for i in range(4)]


@torch.no_grad()
def stateless(
    model: Any,
    tokens: Tensor,
    calibration: Calibration,
    options: Mapping[str, Any],
    positions: int = 512,
    rules: Sequence[str] = ("operator",),
    done: Callable[[str, dict[str, float]], None] = lambda rule, row: None,
) -> dict[str, dict[str, float]]:
    """Whole-sequence forward of ``tokens [1, S]`` without a cache, by rule: the distances at ``positions`` tokens
    spaced over the last half, and ``retained``.

    ``done`` is called with each rule's row as it comes. Raises :class:`QualityError` for a rule that is not in
    :data:`BLOCK_RULES`.
    """
    for rule in rules:
        if rule not in BLOCK_RULES:
            raise QualityError(f"rule {rule!r}: allowed are {', '.join(BLOCK_RULES)}")
    length = tokens.shape[1]
    wanted = torch.linspace(length // 2, length - 2, positions).round().long()
    dense = model(tokens, use_cache=False, logits_to_keep=wanted).logits[0].float().log_softmax(-1)
    full = {"skip_layers": SKIP, "lowering": "eager", "calibration": calibration} | dict(options)
    result = {}
    for rule in rules:
        torch._dynamo.reset()
        kept: list[Tensor] = []
        forward = torch.compile(model.forward, backend="sals", options=full, dynamic=False)
        with _lowering_to(torch.ops.sals.block_attend.default, partial(_Blocks, rule=rule, kept=kept)):
            found = forward(tokens, use_cache=False, logits_to_keep=wanted).logits[0].float().log_softmax(-1)
        if not kept:
            raise QualityError("no layer of the whole-sequence forward went sparse: see `sals explain --no-cache`")
        distances = compare(dense, found, tokens[0, wanted + 1])
        result[rule] = {name: float(values.mean()) for name, values in distances.items()}
        result[rule] |= {"retained": float(torch.stack(kept).mean()), "positions": float(positions)}
        done(rule, result[rule])
    return result


class _Blocks(Interpreter):
    """Runs a rewritten graph without a cache (eager); at every site selects by ``rule`` and notes the mass attended.

    The mass is taken at every :data:`BLOCKS_SEEN`-th block of queries.
    """

    def __init__(self, gm: GraphModule, rule: str, kept: list[Tensor]) -> None:
        super().__init__(gm)
        self.rule, self.kept = rule, kept
        self.selected: dict[Node, list[Any]] = {}
        self.generator = torch.Generator().manual_seed(0)

    def run_node(self, n: Node) -> Any:
        if n.target is torch.ops.sals.block_select.default:
            self.selected[n] = list(self.fetch_args_kwargs_from_env(n)[0])
        if n.target is not torch.ops.sals.block_attend.default:
            return super().run_node(n)
        args = list(self.fetch_args_kwargs_from_env(n)[0])
        args[3] = self._chosen(_BlockScores(self.selected.pop(n.args[3]), args), args[3])
        return n.target(*args)

    def _chosen(self, site: _BlockScores, chosen: Tensor) -> Tensor:
        chosen = chosen.clone()
        masses = []
        for block in range(chosen.shape[1]):
            if self.rule != "operator":
                chosen[:, block] = reference.select(site.scores(block, self.rule, self.generator), chosen.shape[2])
            if block % BLOCKS_SEEN == BLOCKS_SEEN - 1:
                mass = site.exact(block).softmax(-1)
                attended = _as_set(chosen[:, block], mass.shape[-1])
                masses.append((mass * attended[:, None, None]).sum(-1).mean())
        if masses:
            self.kept.append(torch.stack(masses).mean())
        return chosen


#: Of so many blocks of queries, the retained mass of one is measured.
BLOCKS_SEEN = 8


class _BlockScores:
    """Scores of one site's keys for a block of queries, by any of :data:`BLOCK_RULES`. Arguments are the operators'."""

    def __init__(self, select: list[Any], attend: list[Any]) -> None:
        self.query, key_pre, cos, sin, encoder, decoder = select[:6]
        self.tensors, self.integers, self.size, _, self.sinks, self.near, self.rotary = select[7:14]
        self.rotated, self.key, self.scale = attend[0], attend[1], attend[8]
        self.modifier = Modifier.parse(select[6])
        self.total, self.kv_heads = key_pre.shape[1:3]
        blocks = -(-self.total // reference.BLOCK)
        fill = (0, 0, 0, blocks * reference.BLOCK - self.total)
        self.latent = torch.nn.functional.pad(key_pre.flatten(2).float() @ encoder.float(), fill)
        self.basis = decoder.float().view(decoder.shape[0], self.kv_heads, -1).permute(1, 2, 0)
        if self.rotary != "none":
            rows = (torch.nn.functional.pad(r, fill).unflatten(1, (blocks, reference.BLOCK)) for r in (cos, sin))
            cos, sin = reference.block_means(*rows)
        self.rows = cos, sin

    def exact(self, block: int) -> Tensor:
        """True logits ``[B,H,L,S]`` of a block, masked ones -inf."""
        query = self._of_block(self.rotated, block).float().unflatten(2, (self.kv_heads, -1))
        return self._modified(torch.einsum("blngd,bsnd->bngls", query, self.key.float()).flatten(1, 2), block)

    def scores(self, block: int, rule: str, generator: torch.Generator) -> Tensor:
        """``[B,S]``; +inf: always attended, -inf: never."""
        masked = self._modified(self._approximate(block, 1), block) if "query" in rule else self.exact(block)
        allowed = (masked > -torch.inf).any(2).any(1)
        keys = torch.arange(self.total)
        if rule in ("oracle", "query-mass"):
            scores = masked.softmax(-1).sum((1, 2))
        elif rule == "query-max":
            scores = self._approximate(block, 1).sum(1)
            scores = torch.where((masked > -torch.inf).any(1), scores, -torch.inf).amax(1)
        elif rule == "run-max":
            length = reference.block_runs(self.size)[1]
            seen = [part.any(1) for part in (masked > -torch.inf).any(1).split(length, 1)]
            scores = self._approximate(block, length).sum(1)
            scores = torch.where(torch.stack(seen, 1), scores, -torch.inf).amax(1)
        elif rule == "random":
            scores = torch.rand(allowed.shape, generator=generator)
        elif rule == "recent":
            scores = keys.float().expand_as(allowed)
        else:
            logits = self._approximate(block, self.size)[:, :, 0]  # [B,H,S]
            if rule == "head-mass":
                logits = torch.where(allowed.unsqueeze(1), logits * self.scale, -torch.inf).softmax(-1)
            scores = logits.amax(1) if rule == "head-max" else logits.sum(1)
        first = block * self.size + self.total - self.query.shape[1]
        near = (keys > first - self.near) & (keys < first + self.size + self.near)
        scores = torch.where((keys < self.sinks) | near, torch.inf, scores)
        return torch.where(allowed, scores, -torch.inf)

    def _approximate(self, block: int, run: int) -> Tensor:
        """Unscaled logits ``[B,H,L/run,S]`` from latents, as the selection sees them, of means of ``run`` queries."""
        query = self._of_block(self.query, block).float()
        means = torch.stack([part.mean(1) for part in query.split(run, 1)], 1).unflatten(2, (self.kv_heads, -1))
        return reference.latent_logits(means, self.basis, self.latent, *self.rows, self.rotary)[..., : self.total]

    def _of_block(self, query: Tensor, block: int) -> Tensor:
        return query[:, block * self.size : (block + 1) * self.size]

    def _modified(self, logits: Tensor, block: int) -> Tensor:
        logits = logits * self.scale
        batch, heads, queries, _ = logits.shape
        indices = {
            "b": torch.arange(batch).view(-1, 1, 1, 1),
            "h": torch.arange(heads).view(1, -1, 1, 1),
            "q": (torch.arange(queries) + block * self.size).view(1, 1, -1, 1),
            "kv": torch.arange(self.total).view(1, 1, 1, -1),
            "score": logits,
        }
        if self.modifier.modifies:
            logits = evaluate(self.modifier.score, indices, self.tensors, self.integers)
        if self.modifier.masks:
            logits = torch.where(evaluate(self.modifier.mask, indices, self.tensors, self.integers), logits, -torch.inf)
        return logits


def table(results: Sequence[Result], title: str) -> Any:
    """A rich table of the results."""
    from rich.table import Table

    shown = Table(title=title)
    columns = ("row", "ΔNLL", "KL", "top-1", "top-p", "retained", "recall", "B/token", "×", "× layer", "key bytes")
    for column in columns:
        shown.add_column(column, justify="left" if column == "row" else "right")
    for r in results:
        shown.add_row(
            r.name,
            f"{r.nll:+.4f}",
            f"{r.kl:.4f}",
            f"{r.top1:.3f}",
            f"{r.top_p:.3f}",
            "" if r.retained is None else f"{r.retained:.3f}",
            "" if r.recall is None else f"{r.recall:.3f}",
            f"{r.bytes:.0f}",
            f"{r.dense_bytes / r.bytes:.2f}",
            f"{r.layer_ratio:.2f}",
            f"{r.key_share:.1%}",
        )
    return shown


def plot(results: Sequence[Result], path: Path) -> None:
    """KL against KV bytes per token, one line per method. Needs matplotlib (``pip install 'sals-compile[plots]'``)."""
    try:
        import matplotlib
    except ImportError as error:
        raise QualityError("--plot needs matplotlib: pip install 'sals-compile[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    lines: dict[str, list[Result]] = {}
    for result in results:
        lines.setdefault(result.method, []).append(result)
    for number, (method, members) in enumerate(lines.items()):
        members = sorted(members, key=lambda r: r.bytes)
        marker = "osD^vP*Xhd<>p"[number % 13]
        axes.plot([r.bytes for r in members], [max(r.kl, 1e-5) for r in members], marker=marker, label=method)
    axes.set_yscale("log")
    axes.set_xlabel("KV bytes per token, everything counted")
    axes.set_ylabel("KL to the dense model, nats")
    dense = results[0].dense_bytes
    axes.axvline(dense, color="0.6", linestyle=":")
    axes.annotate("dense", (dense, axes.get_ylim()[1]), ha="right", va="top", color="0.4", rotation=90)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def environment(model: Any) -> dict[str, Any]:
    """Where and when: for the JSON."""
    import transformers

    from .. import __version__

    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    device = next(model.parameters()).device
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "threads": torch.get_num_threads(),
        "dtype": str(next(model.parameters()).dtype),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "sals-compile": __version__,
        },
    }


def parse_row(text: str) -> tuple[str, tuple[str, dict[str, Any]]]:
    """``NAME:option=value,option=value`` to a row. Values are JSON where they read as JSON."""
    name, found, rest = text.partition(":")
    if not found or not name:
        raise QualityError(f"--row {text!r}: write NAME:option=value,option=value")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise QualityError(f"--row {text!r}: {part!r} is no option=value")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return name, (name, options)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="sals bench quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="smollm2", help="as for `sals explain`, language models only")
    made.add_argument("--text", type=Path, nargs="*", default=[], metavar="FILE", help="text to test on")
    made.add_argument("--calibration-text", type=Path, nargs="*", default=[], metavar="FILE", help="to calibrate on")
    made.add_argument("--calibration", type=Path, metavar="FILE", help="a calibration made before")
    made.add_argument("--tokens", type=int, default=4096, help="tokens of a window")
    made.add_argument("--windows", type=int, default=1, help="test windows")
    made.add_argument("--depths", help="comma-separated cached tokens where decoding starts (default: four)")
    made.add_argument("--positions", type=int, default=128, help="tokens decoded from each depth")
    made.add_argument("--chunk", type=int, default=8, help="tokens per decode call, 1 to 64; each selects for itself")
    made.add_argument("--rows", default=",".join(DEFAULT_ROWS), help="names of rows, or 'all' (includes --cross)")
    made.add_argument("--row", action="append", default=[], metavar="NAME:OPTION=VALUE,...", help="one more row")
    made.add_argument("--cross", action="store_true", help="also Python source, calibrated on it and on prose")
    made.add_argument(
        "--stateless", type=int, nargs="?", const=1024, metavar="T", help="also a whole-sequence forward (T: 1024)"
    )
    made.add_argument("--rules", default="operator", help="its selection rules, comma-separated, or 'all'")
    made.add_argument("--lowering", default="eager", choices=("eager", "inductor"))
    made.add_argument("--no-inspect", action="store_true", help="leave out retained mass and recall (faster)")
    made.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    made.add_argument("--json", type=Path, help="write the results here")
    made.add_argument("--plot", type=Path, help="draw loss against bytes here")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``sals bench quality``. Returns the exit code: 0, or 2 for a bad argument."""
    from rich.console import Console

    args = parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    logging.getLogger("sals_compile").setLevel(logging.ERROR)
    try:
        rows = dict(ROWS) if args.rows == "all" else {n: ROWS[n] for n in args.rows.split(",") if n}
        rows |= dict(parse_row(r) for r in args.row)
        if not 1 <= args.chunk <= 64:
            raise QualityError(f"--chunk {args.chunk}: 1 to 64 tokens per decode call")
        rules = BLOCK_RULES if args.rules == "all" else tuple(args.rules.split(","))
        texts = corpora(args.text, args.calibration_text)
        depths = [int(d) for d in args.depths.split(",")] if args.depths else None
        model, tokenizer = models.load(args.model, dtype=getattr(torch, args.dtype))
        known = {}
        if args.calibration:
            known[next(iter(texts))] = Calibration.load(args.calibration)
            known[next(iter(texts))].check(model)
        results: list[Result] = []
        facts = environment(model) | {"arguments": {k: str(v) for k, v in vars(args).items()}}

        def done(result: Result) -> None:
            results.append(result)
            if args.json:
                args.json.write_text(json.dumps(facts | {"rows": [vars(r) for r in results]}, indent=1, default=str))

        if rows:
            run(
                model,
                tokenizer,
                rows,
                tokens=args.tokens,
                depths=depths,
                positions=args.positions,
                windows=args.windows,
                chunk=args.chunk,
                lowering=args.lowering,
                texts=texts,
                cross=args.cross or args.rows == "all",
                calibrations=known,
                inspect=not args.no_inspect,
                done=done,
            )
        if results:
            console.print(table(results, f"{args.model}, windows of {args.tokens} tokens"))
        if args.stateless:
            corpus = next(iter(texts))
            pieces = windows_of(tokenizer, texts[corpus][1], args.tokens, 1, corpus)
            if corpus not in known:
                cut = windows_of(tokenizer, texts[corpus][0], args.tokens, 4, corpus)
                known[corpus] = calibrate(model, cut, progress=True)

            def say(rule: str, row: dict[str, float]) -> None:
                shown = ", ".join(f"{name} {value:.4f}" for name, value in row.items())
                console.print(f"whole-sequence forward, T={args.stateless}, rule {rule}: {shown}", markup=False)

            options = {"budget": args.stateless}
            facts["stateless"] = stateless(model, pieces[0], known[corpus], options, rules=rules, done=say)
        if args.json:
            args.json.write_text(json.dumps(facts | {"rows": [vars(r) for r in results]}, indent=1, default=str))
        if args.plot and results:
            plot(results, args.plot)
    except KeyError as error:
        print(f"sals bench quality: no row {error}; there are {', '.join(ROWS)}", file=sys.stderr)
        return 2
    except (QualityError, OptionError, ImportError, OSError, ValueError) as error:
        print(f"sals bench quality: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
