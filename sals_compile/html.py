"""The page about what the compiler did: one self-contained file, readable without network and without scripts.

``page(graphs)`` is what ``Explanation.save_html`` writes. Everything that comes from a model (names, reasons, shapes)
is escaped.
"""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule

from .config import SalsConfig
from .picture import after_picture, before_picture, neighbourhood, svg

if TYPE_CHECKING:
    from .passes.ir import SitePlan
    from .report import GraphReport, SiteReport

#: Sites whose pictures are drawn in one page; the table always has all of them.
MAX_PICTURES = 160


def page(graphs: Sequence[GraphReport]) -> str:
    """The HTML text about ``graphs``, in the order in which they were traced."""
    sites = [s for g in graphs for s in g.sites]
    body = [
        "<header><h1>What sals-compile did</h1>",
        f'<p class="lead">{_headline(sites)}</p>',
        f'<p class="meta">torch {escape(torch.__version__)}, Python {platform.python_version()}, '
        f"{len(graphs)} graph{'s' * (len(graphs) != 1)}</p></header><main>",
    ]
    budget = [MAX_PICTURES]
    for number, graph in enumerate(graphs):
        body.append(_graph(graph, number, len(graphs), budget))
    if not graphs:
        body.append("<p>Nothing was traced: the function ran without a graph.</p>")
    body.append("</main>")
    return _TEMPLATE.replace("{{style}}", _STYLE + _highlight_style()).replace("{{body}}", "\n".join(body))


def _headline(sites: Sequence[SiteReport]) -> str:
    if not sites:
        return "No attention site was found."
    count = {s: sum(x.status == s for x in sites) for s in ("sals", "reconstruct", "exact", "dense", "declined")}
    words = {
        "sals": "rewritten to sparse attention in latent space",
        "reconstruct": "rewritten to low-rank keys, all rebuilt",
        "exact": "rewritten in exact mode",
        "dense": "left dense by the plan",
        "declined": "declined",
    }
    return f"{len(sites)} attention site{'s' * (len(sites) != 1)}: " + ", ".join(
        f"<b>{n}</b> {words[s]}" for s, n in count.items() if n
    )


def _graph(graph: GraphReport, number: int, total: int, budget: list[int]) -> str:
    head = f"<h2>Graph {number + 1} of {total}</h2>" if total > 1 else ""
    parts = [f"<section>{head}", _summary(graph), _table(graph, number), _declined(graph, number)]
    parts += [_pictures(graph, number, budget), _kernels(graph), _timings(graph), _options(graph.config)]
    return "\n".join(p for p in parts if p) + "</section>"


def _summary(graph: GraphReport) -> str:
    stored = graph.kv_bytes_per_token()
    cards = [
        ("sites", str(len(graph.sites)), f"{graph.rewritten} rewritten"),
        ("verified", str(graph.verified), "original subgraph and record agree on random data"),
    ]
    if stored["dense"] and graph.rewritten:
        cards.append(
            (
                "KV bytes per token",
                f"{stored['sals']:,.0f}",
                f"{stored['dense']:,.0f} dense: ×{stored['sals'] / stored['dense']:.2f}",
            )
        )
    budgets = sorted({s.budget for s in graph.sites if s.budget})
    if budgets:
        c = graph.config
        span = str(budgets[0]) if len(budgets) == 1 else f"{budgets[0]} to {budgets[-1]}"
        chosen = str(budgets[0] - c.sinks - c.recents) if len(budgets) == 1 else "the others"
        cards.append(
            ("budget", f"{span} tokens", f"{c.sinks} sinks, {c.recents} recents, {chosen} chosen by score"),
        )
        masses = [s.predicted_mass for s in graph.sites if s.predicted_mass is not None]
        if masses:
            span = f"{min(masses):.0%}" if len(masses) == 1 else f"{min(masses):.0%} to {max(masses):.0%}"
            cards.append(("predicted retained mass", span, "of attention, by layer, on the calibration's text"))
        else:
            cards.append(("predicted retained mass", "not known", "give option calibration to predict it"))
    cards.append(("compile passes", f"{sum(graph.timings.values()):.2f} s", "before lowering"))
    boxes = "".join(
        f'<div class="card"><span>{escape(k)}</span><b>{escape(v)}</b><small>{escape(d)}</small></div>'
        for k, v, d in cards
    )
    note = ""
    if stored["dense"] and any(p.action != "dense" and not p.site.virtual for p in graph.plans):
        note = (
            '<p class="note">The dense buffers stay allocated beside the latents as a mirror, '
            "so less is read, and nothing is saved yet: a SalsCache or LatentCache keeps no dense buffers.</p>"
        )
    return f'<div class="cards">{boxes}</div>{note}'


def _table(graph: GraphReport, number: int) -> str:
    columns = ["site", "became", "heads", "rotary", "mask", "cache", "R / Rs", "T", "mass"]
    columns += ["bytes/token", "verified", "why"]
    rows = []
    for index, site in enumerate(graph.sites):
        mask = site.mask + (f"; score: {site.score}" if site.score else "")
        size = f"{site.kv_bytes_per_token:,.0f} / {site.dense_bytes_per_token:,.0f}" if site.cache and site.rank else ""
        cells = [
            f'<a href="#g{number}s{index}">{escape(site.name)}</a>',
            f'<span class="tag {site.status}">{site.status}</span>',
            escape(site.heads),
            escape(site.rotary),
            f"<code>{escape(mask)}</code>" if mask else "",
            _cache(site),
            f"{site.rank} / {site.score_rank}" if site.rank else "",
            str(site.budget or ""),
            "" if site.predicted_mass is None else f"{site.predicted_mass:.3f}",
            size,
            "" if site.verified_error is None else f"{site.verified_error:.0e}",
            escape(site.reason),
        ]
        rows.append(cells)
    if not rows:
        return "<p>No attention site was found in this graph.</p>"
    filled = [i for i in range(len(columns)) if any(cells[i] for cells in rows)]
    head = "".join(f"<th>{escape(columns[i])}</th>" for i in filled)
    body = "".join("<tr>" + "".join(f"<td>{cells[i]}</td>" for i in filled) + "</tr>" for cells in rows)
    legend = (
        '<p class="legend">heads: query/KV×dim. mask and score: expressions over batch <code>b</code>, head '
        "<code>h</code>, query <code>q</code> and cache slot <code>kv</code>; <code>a0</code> is a tensor and "
        "<code>n0</code> an integer of the graph. R/Rs: rank of the latent, and how much of it scores tokens. T: "
        "tokens attended. bytes/token: of keys and values, stored / dense. verified: relative difference between the "
        "original subgraph and its record, run on random data."
        + (" mass: share of attention that the best T tokens get on the calibration's text." if 8 in filled else "")
        + "</p>"
    )
    table = f"<table class='sites'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<h3>Sites</h3><div class='scroll'>{table}</div>{legend}"


def _cache(site: SiteReport) -> str:
    kind, _, buffer = site.cache.partition(" ")
    return f'<span title="input {escape(buffer, quote=True)} of the graph">{escape(kind)}</span>' if buffer else kind


def _declined(graph: GraphReport, number: int) -> str:
    offset = len(graph.plans)
    parts = []
    for index, site in enumerate(graph.sites[offset:], offset):
        node = next((n for n in graph.graph_before.graph.nodes if n.name == site.node), None)
        drawing = svg(neighbourhood(node), f"surroundings of {site.node}") if node is not None else ""
        remedy = f"<p>What would make it match: {escape(site.remedy)}</p>" if site.remedy else ""
        picture = f"<div class='scroll'>{drawing}</div>" if drawing else ""
        parts.append(
            f'<details class="site" open><summary><span class="tag declined">declined</span> '
            f'{escape(site.name)}</summary><p id="g{number}s{index}">{escape(site.reason)}</p>'
            f"{remedy}{picture}</details>"
        )
    return "<h3>Declined: the nearest miss</h3>" + "".join(parts) if parts else ""


def _pictures(graph: GraphReport, number: int, budget: list[int]) -> str:
    plans = graph.plans
    if not plans:
        return ""
    after = graph.rewritten_with_values().gm if graph.rewritten else graph.graph_before
    parts = []
    for index, plan in enumerate(plans):
        if budget[0] <= 0:
            parts.append(f"<p>{len(plans) - index} more sites are not drawn.</p>")
            break
        budget[0] -= 1
        parts.append(_site(graph, plan, after, f"g{number}s{index}", opened=index == 0))
    key = (
        '<p class="key"><span class="k input">input</span><span class="k state">state kept by sals</span>'
        '<span class="k anchor">attention as matched</span><span class="k sals">sals operator</span>'
        '<span class="k gone">dashed red: removed</span><span class="k new">bold: new</span> '
        "Views (transpose, expand, …) are drawn as part of the edges.</p>"
    )
    return f"<h3>Graphs, before and after</h3>{key}" + "".join(parts)


def _site(graph: GraphReport, plan: SitePlan, after: GraphModule, anchor: str, opened: bool) -> str:
    site = plan.site
    before = svg(before_picture(site, after), f"{site.name} before", "before")
    rewritten = plan.action != "dense"
    new = svg(after_picture(site, graph.graph_before, after), f"{site.name} after", "after") if rewritten else ""
    facts = [f"scale <code>{site.scale:g}</code>", f"mask <code>{escape(str(site.modifier.mask))}</code>"]
    if site.modifier.modifies:
        facts.append(f"score <code>{escape(str(site.modifier.score))}</code>")
    names = [f"<code>a{i}</code> = {escape(n.name)}" for i, n in enumerate(site.modifier_tensors)]
    names += [f"<code>n{i}</code> = {escape(str(n))}" for i, n in enumerate(site.modifier_integers)]
    columns = _figure("before", before) + (_figure("after", new) if new else "")
    return (
        f'<details class="site"{" open" if opened else ""}><summary><span class="tag {plan.action}">{plan.action}'
        f'</span> {escape(site.name)}</summary><p id="{anchor}">{escape(plan.reason)}</p>'
        f"<p>{', '.join([*facts, *names])}</p><div class='pair'>{columns}</div></details>"
    )


def _figure(caption: str, drawing: str) -> str:
    """A drawing that stands beside the next one where both fit at seven tenths of their size, else above it."""
    drawn = re.search(r'width="(\d+)"', drawing)
    basis = f' style="flex-basis:{0.7 * int(drawn[1]):.0f}px"' if drawn else ""
    return f"<figure{basis}><figcaption>{caption}</figcaption><div class='scroll'>{drawing}</div></figure>"


def _kernels(graph: GraphReport) -> str:
    sources = graph.generated_sources()
    if not sources:
        return ""
    parts = []
    for text, names in sources.items():
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} sites)"
        parts.append(
            f"<details class='code'><summary>{escape(label)}</summary>"
            f"<div class='scroll'><pre>{_highlight(text)}</pre></div></details>"
        )
    return (
        "<h3>Generated kernels</h3><p>Triton device functions printed from the expressions above; the score and attend "
        "kernels call them on a GPU. On a CPU the expressions are evaluated in PyTorch and compiled with the rest.</p>"
        + "".join(parts)
    )


def _timings(graph: GraphReport) -> str:
    longest = max(graph.timings.values(), default=0.0) or 1.0
    rows = "".join(
        f'<tr><td>{escape(k)}</td><td class="num">{v:.3f} s</td>'
        f'<td class="bar"><i style="width:{100 * v / longest:.0f}%"></i></td></tr>'
        for k, v in graph.timings.items()
    )
    return f"<h3>Passes</h3><table class='timings'>{rows}</table>" if rows else ""


def _options(config: SalsConfig) -> str:
    default = SalsConfig()
    rows = []
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        shown = type(value).__name__ if entry.name == "calibration" and value is not None else repr(value)
        changed = " class='set'" if value != getattr(default, entry.name) else ""
        rows.append(f"<tr{changed}><td>{entry.name}</td><td><code>{escape(shown)}</code></td></tr>")
    return f"<details class='code'><summary>Options</summary><table>{''.join(rows)}</table></details>"


def _highlight(text: str) -> str:
    if find_spec("pygments") is None:
        return escape(text)
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return highlight(text, PythonLexer(), HtmlFormatter(nowrap=True))


def _highlight_style() -> str:
    if find_spec("pygments") is None:
        return ""
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs("pre")
    dark = HtmlFormatter(style="monokai").get_style_defs("pre")
    rules = [line for line in light.splitlines() if line.startswith("pre .")]
    night = [line for line in dark.splitlines() if line.startswith("pre .")]
    return "\n".join(rules) + "\n@media (prefers-color-scheme: dark) {\n" + "\n".join(night) + "\n}\n"


_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>What sals-compile did</title><link rel="icon" href="data:,"><style>
{{style}}
</style></head><body>
{{body}}
</body></html>
"""

_STYLE = """
:root { --bg:#fbfbfa; --fg:#1d2329; --dim:#5d6a75; --line:#d9dee3; --card:#fff; --box:#fff; --blue:#1c6dbd;
  --bluebg:#dcecfb;
  --red:#b3352b; --redbg:#fbe6e3; --amber:#8a6100; --amberbg:#fdf0cf; --green:#1d7a46; --greenbg:#dff3e7;
  --grey:#eceff2; --shade:#0003; }
@media (prefers-color-scheme: dark) { :root { --bg:#15191d; --fg:#e4e8ec; --dim:#9aa7b3; --line:#343c44;
  --card:#1d2329; --box:#232a31;
  --blue:#7cbcf5; --bluebg:#17364f; --red:#f0938a; --redbg:#4a211d; --amber:#e8c063; --amberbg:#40330f;
  --green:#7dd3a0;
  --greenbg:#173a27; --grey:#2b333a; --shade:#000a; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--bg); color:var(--fg); font:15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
header, main { max-width:1480px; margin:0 auto; padding:0 20px; }
h1 { font-size:1.6em; margin:28px 0 4px; } h2 { margin:40px 0 12px; font-size:1.3em;
  border-top:1px solid var(--line); padding-top:24px; }
h3 { margin:30px 0 8px; font-size:1.05em; }
.lead { font-size:1.1em; margin:4px 0; } .meta, .legend, .note, .key { color:var(--dim); font-size:.87em; }
a { color:var(--blue); text-decoration:none; } a:hover { text-decoration:underline; }
code, pre { font-family:ui-monospace, "DejaVu Sans Mono", monospace; font-size:.86em; }
.cards { display:grid; grid-template-columns:repeat(auto-fit, minmax(150px, 1fr)); gap:10px; margin-top:18px; }
.card { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:10px 14px; display:flex;
  flex-direction:column; }
.card span { color:var(--dim); font-size:.82em; } .card b { font-size:1.35em; } .card small { color:var(--dim); }
.scroll { --under:var(--bg); overflow-x:auto; background-repeat:no-repeat; background-image:
    linear-gradient(90deg, var(--under) 60%, transparent), linear-gradient(270deg, var(--under) 60%, transparent),
    linear-gradient(90deg, var(--shade), transparent), linear-gradient(270deg, var(--shade), transparent);
  background-size:28px 100%, 28px 100%, 14px 100%, 14px 100%; background-position:0, 100%, 0, 100%;
  background-attachment:local, local, scroll, scroll; }
details .scroll { --under:var(--card); }
table { border-collapse:collapse; font-size:.87em; }
.sites th:first-child, .sites td:first-child { position:sticky; left:0; background:var(--bg); }
th, td { text-align:left; padding:4px 10px; border-bottom:1px solid var(--line); vertical-align:top;
  white-space:nowrap; }
.sites td:last-child { white-space:normal; min-width:320px; }
th { color:var(--dim); font-weight:600; }
.tag { border-radius:4px; padding:1px 7px; font-size:.85em; background:var(--grey); white-space:nowrap; }
.tag.sals, .tag.exact, .tag.reconstruct { background:var(--greenbg); color:var(--green); }
.tag.declined { background:var(--redbg); color:var(--red); } .tag.dense { background:var(--amberbg);
  color:var(--amber); }
details { background:var(--card); border:1px solid var(--line); border-radius:8px; margin:8px 0; padding:0 14px; }
summary { cursor:pointer; padding:9px 0; } details[open] { padding-bottom:12px; }
details p { margin:2px 0 8px; color:var(--dim); font-size:.9em; }
.pair { display:flex; flex-wrap:wrap; gap:14px; align-items:start; }
figure { margin:0; min-width:0; max-width:100%; flex-grow:1; } figcaption { color:var(--dim); font-size:.85em; }
pre { margin:0; line-height:1.4; }
svg { display:block; margin:0 auto; }
@media (min-width:900px) { .pair svg { max-width:100%; height:auto; } }
svg text { font:11px ui-monospace, "DejaVu Sans Mono", monospace; text-anchor:middle; fill:var(--fg); }
  svg text.d { font-size:9.5px; fill:var(--dim); }
svg path.e { fill:none; stroke:var(--dim); stroke-opacity:.55; } svg path.state { stroke:var(--amber);
  stroke-dasharray:1 3; }
svg rect { fill:var(--box); stroke:var(--dim); stroke-opacity:.6; }
svg .edge rect, svg .input rect { fill:var(--grey); } svg .state rect { fill:var(--amberbg); stroke:var(--amber); }
svg .anchor rect { fill:var(--redbg); stroke:var(--red); } svg .sals rect { fill:var(--bluebg); stroke:var(--blue); }
svg .op.changed rect, svg .anchor.changed rect { stroke:var(--red); stroke-dasharray:4 3; stroke-opacity:1; }
svg.after .op.changed rect { stroke:var(--blue); stroke-dasharray:none; stroke-width:2; }
svg .sals.changed rect { stroke-width:2; stroke-opacity:1; }
.k { border:1px solid var(--line); border-radius:4px; padding:1px 8px; margin-right:6px; display:inline-block;
  color:var(--fg); }
.k.state { background:var(--amberbg); } .k.anchor { background:var(--redbg); } .k.sals { background:var(--bluebg); }
  .k.input { background:var(--grey); }
.k.gone { border:1px dashed var(--red); } .k.new { border:2px solid var(--blue); }
.timings td { border:0; } td.num { text-align:right; } td.bar { width:240px; }
td.bar i { display:block; height:10px; margin-top:6px; background:var(--blue); border-radius:3px; min-width:1px; }
tr.set td { font-weight:700; }
@media (max-width:640px) { header, main { padding:0 12px; } body { font-size:14px; } details { padding:0 10px; }
  td.bar { width:110px; } }
"""
