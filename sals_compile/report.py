"""What the compiler did: sites, graphs, bytes, timings; as objects and as a readable table."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from .cache import bytes_per_token, kv_bytes_per_token
from .config import SalsConfig
from .passes.ir import AttentionSite, Declined, SitePlan

if TYPE_CHECKING:
    from .runtime import CompiledGraph

_reports: deque[GraphReport] = deque(maxlen=64)


@dataclass(frozen=True)
class SiteReport:
    """One attention site: ``status`` is ``sals``, ``reconstruct``, ``exact``, ``dense`` or ``declined``, ``reason`` says why."""

    name: str
    status: str
    reason: str
    heads: str = ""
    rotary: str = ""
    mask: str = ""
    score: str = ""
    cache: str = ""
    rank: int = 0
    score_rank: int = 0
    budget: int = 0
    verified_error: float | None = None
    kv_bytes_per_token: float = 0.0
    dense_bytes_per_token: float = 0.0


class GraphReport:
    """One compiled graph.

    Attributes:
        sites: a :class:`SiteReport` per attention site, declined ones included.
        timings: seconds per pass.
        graph_before, graph_after: the ATen graph as matched, and as rewritten (FX modules that run; the latter takes the state tensors
            of ``state_inputs`` after the graph's own inputs).
    """

    def __init__(
        self,
        compiled: CompiledGraph,
        plans: Sequence[SitePlan],
        declined: Sequence[Declined],
        config: SalsConfig,
        timings: Mapping[str, float],
    ) -> None:
        self._compiled = compiled
        self.config = config
        self.timings = dict(timings)
        self.sites = [_site_report(p, config) for p in plans] + [
            SiteReport(d.name, "declined", d.reason + (f" (at {d.node})" if d.node else "")) for d in declined
        ]

    @property
    def graph_before(self) -> GraphModule:
        return self._compiled.gm

    @property
    def graph_after(self) -> GraphModule:
        return self._compiled.rewrite("sparse").gm

    @property
    def state_inputs(self) -> list[Any]:
        """Descriptions of the extra inputs of ``graph_after``, in order."""
        return self._compiled.rewrite("sparse").inputs

    @property
    def rewritten(self) -> int:
        """Sites that run through ``sals`` operators."""
        return sum(s.status in ("sals", "reconstruct", "exact") for s in self.sites)

    @property
    def verified(self) -> int:
        return sum(s.verified_error is not None for s in self.sites)

    def kv_bytes_per_token(self) -> dict[str, float]:
        """KV-cache bytes per token and batch row over all cached sites, at the cache's capacity: ``dense`` and ``sals``.

        Counted in ``sals``: latents and their scales, value codes and scales, the exact rings, and rotary rows with their block means.
        """
        return kv_bytes_per_token(self._compiled.plans, self._compiled.groups, self.config)

    def __str__(self) -> str:
        return format_sites(self.sites)


@dataclass
class Explanation:
    """What :func:`explain` found: the graphs that Dynamo traced, in order."""

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def sites(self) -> list[SiteReport]:
        return [s for g in self.graphs for s in g.sites]

    @property
    def graph_before(self) -> GraphModule:
        """Of the first graph with a site (most models trace to one graph)."""
        return self._first().graph_before

    @property
    def graph_after(self) -> GraphModule:
        return self._first().graph_after

    def _first(self) -> GraphReport:
        if not self.graphs:
            raise ValueError(
                "nothing was traced: the function ran without a graph (is it decorated with torch.compiler.disable?)"
            )
        return next((g for g in self.graphs if g.sites), self.graphs[0])

    def __str__(self) -> str:
        return format_sites(self.sites)


def record(report: GraphReport) -> None:
    """Keep a report for :func:`compiled_reports`."""
    _reports.append(report)


def compiled_reports() -> list[GraphReport]:
    """Reports of the graphs compiled with ``backend="sals"`` in this process, oldest first (the last 64)."""
    return list(_reports)


def explain(fn: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """Match and rewrite ``fn(*args, **kwargs)`` without compiling it, and report what would become of its attention.

    The call runs once, dense and uncompiled, on copies of the arguments, so that nothing of the caller's (a KV cache, say) changes. ``options`` are
    those of :class:`sals_compile.SalsConfig`. Raises :class:`sals_compile.OptionError` for a bad option.
    """
    from .backend import sals

    found = Explanation()
    chosen = dict(options or {}) | {"lowering": "eager"}

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        before = len(_reports)
        run = sals(gm, example_inputs, options=chosen)
        fresh = [_reports.pop() for _ in range(len(_reports) - before)]
        found.graphs.extend(reversed(fresh))
        return run

    with torch.no_grad():
        copies, keyed = copy.deepcopy((args, kwargs))
        torch.compile(fn, backend=backend)(*copies, **keyed)
    return found


def _site_report(plan: SitePlan, config: SalsConfig) -> SiteReport:
    site = plan.site
    cache = ""
    if site.key_cache is not None:
        cache = f"static[{site.key_cache.capacity}] {site.key_cache.buffer.name}"
    sparse, dense = bytes_per_token(plan, config)
    return SiteReport(
        name=site.name,
        status=plan.action,
        reason=plan.reason,
        heads=f"{site.heads}/{site.kv_heads}x{site.head_dim}",
        rotary=_rotary_text(site),
        mask=str(site.modifier.mask) if site.modifier.masks else "none",
        score=str(site.modifier.score) if site.modifier.modifies else "",
        cache=cache,
        rank=plan.rank,
        score_rank=plan.score_rank,
        budget=config.budget if plan.action == "sals" else 0,
        verified_error=plan.verified_error,
        kv_bytes_per_token=sparse,
        dense_bytes_per_token=dense,
    )


def _rotary_text(site: AttentionSite) -> str:
    if site.key_rotary is None:
        return "none"
    partial = "" if site.rotary_dim == site.head_dim else f" {site.rotary_dim}/{site.head_dim}"
    return site.rotary_form + partial


def format_sites(sites: Sequence[SiteReport]) -> str:
    """A table of sites; runs of sites that differ only in their number are folded into one line."""
    columns = ("site", "status", "heads", "rotary", "mask", "cache", "rank", "T", "verified", "why")
    rows: list[list[str]] = []
    folded: list[tuple[list[str], list[str]]] = []
    for site in sites:
        row = [
            site.status,
            site.heads,
            site.rotary,
            site.mask + (f"; {site.score}" if site.score else ""),
            site.cache.split(" ")[0],
            f"{site.rank}/{site.score_rank}" if site.rank else "",
            str(site.budget or ""),
            "" if site.verified_error is None else f"{site.verified_error:.0e}",
            site.reason,
        ]
        if folded and folded[-1][1] == row:
            folded[-1][0].append(site.name)
        else:
            folded.append(([site.name], row))
    for names, row in folded:
        label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
        rows.append([label, *row])
    if not rows:
        return "no attention sites found"
    widths = [max(len(r[i]) for r in [list(columns), *rows]) for i in range(len(columns))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [list(columns), *rows]]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)
