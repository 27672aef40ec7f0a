"""Sites to ``sals`` operators: the dense attention goes out of the graph, state comes in as extra inputs.

A graph is rewritten once per *variant* (``runtime.py`` picks one per call): ``dense`` keeps attention as it was and
only records what a later import needs (rotary rows, query moments); ``sparse`` attends through the latents. A graph
whose cache has no dense buffers has the variants of :func:`rewrite_virtual` instead. Extra inputs are described by
:class:`StateInput`, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from ..config import SalsConfig
from ..kernels import ops
from ..kernels.virtual import VIRTUAL_BUFFER
from .graph import ancestors
from .ir import AttentionSite, CacheWrite, SitePlan
from .low_rank_query import factored_meaning
from .plan import near_tokens
from .verify import rotary_rows, site_slots

SDPA = ops.operator("scaled_dot_product_attention")
LATENT_FIELDS = ("codes", "scales", "value_codes", "value_scales", "ring_key", "ring_value")
BASIS_FIELDS = ("encoder", "decoder", "value_transform")
DECODER_FIELDS = ("decoder_codes", "decoder_scales")
ROW_FIELDS = ("cos", "sin", "block_cos", "block_sin", "ring_slots")
QUERY_FIELDS = ("down", "up", "shift")


@dataclass(frozen=True)
class StateInput:
    """One extra input: ``field`` of the state of ``owner`` (a site's index, or a row group's)."""

    kind: str  # "latent" | "basis" | "rows" | "query_moment" | "key_moment" | "query" | "short" | "kept"
    owner: int
    field: str


@dataclass(frozen=True)
class RowGroup:
    """Sites that rotate by the same cos/sin at the same slots share their recorded rows.

    Every layer of a cache may count its tokens for itself (transformers' StaticCache does), so slots are grouped by how
    they are computed; that the counters agree is checked at run time (``runtime.py``).
    """

    index: int
    sites: tuple[int, ...]


@dataclass
class Rewritten:
    """A variant: the graph, its extra inputs in order, and how many sites run through ``sals`` operators."""

    gm: GraphModule
    inputs: list[StateInput]
    sites: int


def row_groups(plans: Sequence[SitePlan]) -> list[RowGroup]:
    """Cached sites by what their rows depend on: the cos and sin nodes, how slots are computed, and the capacity."""
    groups: dict[Any, list[int]] = {}
    for index, entry in enumerate(plans):
        site = entry.site
        if not site.cached or entry.action == "dense":
            continue
        assert site.key_cache is not None
        rows: tuple[Any, ...] = ()
        if site.key_rotary is not None:
            rotary = site.key_rotary
            rows = (rotary.form, *((o.node, o.layout) for o in (rotary.cos, rotary.sin)))
        key = (rows, slot_recipe(site.key_cache.slots), site.key_cache.capacity)
        groups.setdefault(key, []).append(index)
    return [RowGroup(i, tuple(members)) for i, members in enumerate(groups.values())]


def slot_recipe(slots: Node) -> str:
    """How a slot node is computed, its inputs known by shape and type alone."""
    steps = ancestors([slots], [])
    number = {node: i for i, node in enumerate(steps)}

    def name(node: Node) -> str:
        return f"%{number[node]}"

    lines = []
    for node in steps:
        value = node.meta.get("val")
        kind = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else str(value)
        computed = (
            "input"
            if node.op == "placeholder"
            else f"{node.target} {map_arg(node.args, name)} {map_arg(node.kwargs, name)}"
        )
        lines.append(f"{kind} {computed}")
    return "\n".join(lines)


def basis_fields(plan: SitePlan, config: SalsConfig) -> tuple[str, ...]:
    """The tensors of a site's basis that its graphs take."""
    site = plan.site
    int8 = plan.action == "sals" and site.cached
    int8 = int8 and config.decoder_in_int8(site.dtype, site.output.meta["val"].device)
    return BASIS_FIELDS + DECODER_FIELDS if int8 else BASIS_FIELDS


class _Tracer(GraphAppendingTracer):
    """Notes on each node that it makes which site it belongs to, for those who lower the graph and report on it."""

    origin = ""

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        node.meta["origin"] = self.origin
        return node


class _Writer:
    """Emits nodes before a point of a copied graph; knows the copies of the original nodes."""

    def __init__(self, gm: GraphModule) -> None:
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        output = self.graph.graph_copy(gm.graph, self.copies)
        self.graph.output(output)
        source = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        next(n for n in reversed(self.graph.nodes) if n.op == "output").meta = dict(source.meta)
        self.tracer = _Tracer(self.graph)
        self.inputs: list[StateInput] = []
        self.state: dict[StateInput, Node] = {}
        self.last_input = [n for n in self.graph.nodes if n.op == "placeholder"][-1:]

    def get(self, node: Node) -> Proxy:
        return Proxy(self.copies[node], self.tracer)

    def input(self, kind: str, owner: int, field: str) -> Proxy:
        """The extra input for a piece of state, made when first asked for."""
        key = StateInput(kind, owner, field)
        if key not in self.state:
            first = next(iter(self.graph.nodes))
            anchor = self.last_input[0] if self.last_input else None
            with self.graph.inserting_after(anchor) if anchor is not None else self.graph.inserting_before(first):
                node = self.graph.placeholder(f"sals_{kind}_{owner}_{field}")
            self.last_input = [node]
            self.state[key] = node
            self.inputs.append(key)
        return Proxy(self.state[key], self.tracer)

    def call(self, name: str, *args: Any) -> Any:
        return ops.operator(name)(*args)

    def finish(self, gm: GraphModule, sites: int) -> Rewritten:
        self.graph.eliminate_dead_code()
        self.graph.lint()
        result = GraphModule(gm, self.graph)
        result.meta = dict(gm.meta)
        return Rewritten(result, self.inputs, sites)


def _modifier(site: AttentionSite, get: Callable[[Node], Any]) -> tuple[str, list[Any], list[Any]]:
    integers = [get(i) if isinstance(i, Node) else i for i in site.modifier_integers]
    return site.modifier.serialized, [get(t) for t in site.modifier_tensors], integers


def _sinks(site: AttentionSite, get: Callable[[Node], Any]) -> Any:
    return None if site.sink_logits is None else get(site.sink_logits)


def _record_rows(writer: _Writer, group: RowGroup, site: AttentionSite) -> None:
    rows = [writer.input("rows", group.index, f) for f in ROW_FIELDS]
    slots = site_slots(site, writer.get)
    new = rotary_rows(site, writer.get) if site.key_rotary is not None else (rows[0][:, :0], rows[1][:, :0])
    writer.call("record_rows", *rows, *new, slots)


def _point(writer: _Writer, site: AttentionSite) -> Any:
    """Where the nodes of a site are made, and whose they are."""
    writer.tracer.origin = site.name
    return writer.graph.inserting_before(writer.copies[site.output])


def decodes_densely(site: AttentionSite, config: SalsConfig) -> bool:
    """Whether a site left dense is a decode step for ``sals::dense_attention``: on a GPU, where the proved mask bounds
    what is read and KV heads are not repeated. A long call, and any on a CPU, stays PyTorch's attention as traced.
    """
    cache = site.key_cache
    if cache is None or site.value_cache is None or site.born:
        return False
    length = cache.slots.meta["val"].shape[-1]
    return _on_gpu(site) and isinstance(length, int) and length <= config.decode_tokens


def _on_gpu(site: AttentionSite) -> bool:
    return site.output.meta["val"].device.type == "cuda"


def _decode_densely(writer: _Writer, site: AttentionSite) -> None:
    """Attention over the buffers that this call has written to, in the place of the one traced."""
    get = writer.get
    with _point(writer, site):
        stored = [c.layout.to_roles(get(c.update)) for c in (site.key_cache, site.value_cache) if c is not None]
        query, modifier = site.query.read(get), _modifier(site, get)
        result = writer.call("dense_attention", query, *stored, *modifier, site.scale, _sinks(site, get))
        _replace_output(writer, site, result)


def rewrite_dense(
    gm: GraphModule, plans: Sequence[SitePlan], groups: Sequence[RowGroup], config: SalsConfig, observe: bool
) -> Rewritten:
    """Attention over the dense buffers; rows are recorded and, with ``observe``, query moments (and key moments where
    no cache holds the keys)."""
    writer = _Writer(gm)
    started: set[int] = set()
    for index, entry in enumerate(plans):
        site = entry.site
        if entry.action == "dense":
            if decodes_densely(site, config):
                _decode_densely(writer, site)
            continue
        with _point(writer, site):
            for group in groups:
                if index in group.sites and group.index not in started:
                    started.add(group.index)
                    _record_rows(writer, group, site)
            if observe and entry.action != "exact":
                writer.call("observe", writer.input("query_moment", index, "moment"), site.query_pre.read(writer.get))
                if not site.cached:
                    writer.call(
                        "observe_keys", writer.input("key_moment", index, "moment"), site.key_pre.read(writer.get)
                    )
        if decodes_densely(site, config):
            _decode_densely(writer, site)
    return writer.finish(gm, 0)


def rewrite_sparse(
    gm: GraphModule, plans: Sequence[SitePlan], groups: Sequence[RowGroup], config: SalsConfig
) -> Rewritten:
    """Every planned site through ``sals`` operators.

    Dense cache writes stay, so that the dense buffers mirror the latents and going back to dense is always right.
    """
    writer = _Writer(gm)
    started: set[int] = set()
    encoded: set[Node] = set()
    count = 0
    for index, entry in enumerate(plans):
        site = entry.site
        if entry.action == "dense":
            if decodes_densely(site, config):
                _decode_densely(writer, site)
            continue
        _factor_query(writer, index, entry)
        with _point(writer, site):
            if site.cached:
                group = next(g for g in groups if index in g.sites)
                if group.index not in started:
                    started.add(group.index)
                    _record_rows(writer, group, site)
                result = _cached(writer, index, entry, group, config, encoded)
            else:
                result = _stateless(writer, index, entry, config)
            _replace_output(writer, site, result)
        count += 1
    return writer.finish(gm, count)


def _replace_output(writer: _Writer, site: AttentionSite, result: Any) -> None:
    """``result [B,L,H,Dv]`` in the place of the site's own output."""
    result = site.output_layout.from_roles(result)
    value = site.output.meta["val"]
    batched = value.dim() == 3 and not site.output_layout.is_identity  # a batched product is contiguous
    if batched or value.is_contiguous():  # views after it were traced for these strides
        result = torch.ops.aten.contiguous.default(result)
    result.node.meta = dict(site.output.meta)
    writer.copies[site.output].replace_all_uses_with(result.node)


def _factor_query(writer: _Writer, index: int, entry: SitePlan) -> None:
    """The query projection as two products of low rank, where that was planned."""
    if entry.low_rank_query is None:
        return
    found = entry.low_rank_query.projection
    assert found.product is not None
    product = writer.copies[found.product]
    writer.tracer.origin = entry.site.name
    with writer.graph.inserting_before(product):
        factors = [writer.input("query", index, f) for f in QUERY_FIELDS]
        thin = factored_meaning(found, writer.get, *factors).node
    thin.meta = dict(found.product.meta)
    product.replace_all_uses_with(thin)
    writer.copies[found.product] = thin


def _cached(
    writer: _Writer, index: int, entry: SitePlan, group: RowGroup, config: SalsConfig, encoded: set[Node]
) -> Any:
    """encode, score and select, attend (or reconstruct) of one site with a cache."""
    site, get = entry.site, writer.get
    cache = site.key_cache
    assert cache is not None
    latents = [writer.input("latent", index, f) for f in LATENT_FIELDS]
    encoder, decoder, transform = (writer.input("basis", index, f) for f in BASIS_FIELDS)
    cos, sin, block_cos, block_sin, ring_slots = (writer.input("rows", group.index, f) for f in ROW_FIELDS)
    slots = site_slots(site, get)
    query = site.query.read(get)
    if cache.buffer not in encoded:  # layers that share one cache write it once
        encoded.add(cache.buffer)
        key = site.key.read(get)
        writer.call("encode", *latents, site.key_pre.read(get), key, site.value.read(get), encoder, transform, slots)
    modifier = _modifier(site, get)
    stored = [*latents, ring_slots]
    if entry.action == "reconstruct":
        return writer.call(
            "reconstruct",
            query,
            *stored,
            cos,
            sin,
            decoder,
            transform,
            *modifier,
            cache.capacity,
            site.scale,
            site.rotary_form,
            _sinks(site, get),
        )
    free = config.scoring == "rope_free" and site.query_rotary is not None
    chosen = writer.call(
        "score_select",
        site.query_pre.read(get) if free else query,
        latents[0],
        latents[1],
        decoder,
        block_cos,
        block_sin,
        ring_slots,
        slots,
        *modifier,
        cache.capacity,
        entry.score_rank,
        config.sinks,
        "none" if free else site.rotary_form,
        cache.capacity if entry.action == "exact" else entry.budget - config.recents,
        config.head_score,
        site.scale,
    )
    int8 = [writer.input("basis", index, f) for f in DECODER_FIELDS if f in basis_fields(entry, config)]
    return writer.call(
        "attend",
        query,
        chosen,
        *stored,
        cos,
        sin,
        decoder,
        transform,
        *modifier,
        site.scale,
        site.rotary_form,
        _sinks(site, get),
        *int8,
    )


def _stateless(writer: _Writer, index: int, entry: SitePlan, config: SalsConfig) -> Any:
    """One selection per block of queries over the call's own keys, attended exactly."""
    site, get = entry.site, writer.get
    query, key, value = site.query.read(get), site.key.read(get), site.value.read(get)
    modifier = _modifier(site, get)
    if entry.action == "exact":
        return writer.call("dense_attention", query, key, value, *modifier, site.scale, _sinks(site, get))
    key_pre = site.key_pre.read(get)
    if site.key_rotary is not None:
        cos, sin = rotary_rows(site, get)
    else:
        cos = sin = key_pre[:, :0, 0, :0]
    encoder = writer.input("basis", index, "encoder")[:, : entry.score_rank]
    decoder = writer.input("basis", index, "decoder")[: entry.score_rank]
    free = config.scoring == "rope_free" and site.query_rotary is not None
    chosen = writer.call(
        "block_select",
        site.query_pre.read(get) if free else query,
        key_pre,
        cos,
        sin,
        encoder,
        decoder,
        *modifier,
        config.query_block,
        entry.budget,
        config.sinks,
        near_tokens(config, entry.budget),
        "none" if free else site.rotary_form,
    )
    return writer.call(
        "block_attend", query, key, value, chosen, *modifier, config.query_block, site.scale, _sinks(site, get)
    )


# ---- a cache without dense buffers -----------------------------------------------------------------------------------

#: ``short``: no more than ``budget`` tokens, kept as they are. ``sparse``: a decode step over latents. The others are
#: prefills, by where the keys before this call come from: none (``fresh``), ``short``'s buffers (``grow``), the latents
#: (``rebuild``).
VIRTUAL_VARIANTS = ("short", "sparse", "fresh", "grow", "rebuild")


def rewrite_virtual(
    gm: GraphModule,
    plans: Sequence[SitePlan],
    groups: Sequence[RowGroup],
    config: SalsConfig,
    variant: str,
    fits: Mapping[int, int],
) -> Rewritten:
    """Sites whose cache is virtual, in one of :data:`VIRTUAL_VARIANTS`; other sites stay as they are.

    A prefill is dense attention as traced, over keys and values that exist for one layer at a time: those before this
    call rebuilt, those of this call exact; it ends by encoding them. ``fits`` names, by site index, who makes a basis
    from the first prefill (an id that ``sals::fit_basis`` knows).
    """
    writer = _Writer(gm)
    started: set[int] = set()
    encoded: set[Node] = set()
    count = 0
    for index, entry in enumerate(plans):
        site = entry.site
        if not site.virtual:
            continue
        assert site.key_cache is not None and site.value_cache is not None
        count += 1
        first = site.key_cache.buffer not in encoded  # layers may share one cache
        if entry.action == "dense":
            if first:
                encoded.add(site.key_cache.buffer)
                _keep(writer, index, site.key_cache, "key")
                _keep(writer, index, site.value_cache, "value")
            if variant in ("short", "sparse") and decodes_densely(site, config):
                _decode_densely(writer, site)
            continue
        group = next(g for g in groups if index in g.sites)
        if variant in ("short", "sparse") and group.index not in started:
            started.add(group.index)
            with _point(writer, site):
                _record_rows(writer, group, site)
        if variant == "sparse":
            _factor_query(writer, index, entry)
            with _point(writer, site):
                _replace_output(writer, site, _cached(writer, index, entry, group, config, encoded))
            continue
        encoded.add(site.key_cache.buffer)
        if variant == "short":
            with _point(writer, site):
                _replace_output(writer, site, _short(writer, index, site, first, index in fits))
            continue
        short = short_slots(plans, site.key_cache.capacity)
        with _point(writer, site):
            if _is_plain(site):
                past = None if variant == "fresh" else _past(writer, index, site, group, short, variant)
                _replace_output(writer, site, _plain_attention(writer, site, past))
        if not _is_plain(site):
            _fill_buffers(writer, index, site, group, short, variant)
        if first:
            with _point(writer, site):
                _store(writer, index, site, group, variant, fits.get(index))
        if index == group.sites[-1]:  # materialize reads the rows as they were before this call
            with _point(writer, site):
                _record_rows(writer, group, site)
    result = writer.finish(gm, count)
    left = [n for n in result.gm.graph.nodes if n.target is VIRTUAL_BUFFER]
    if left:
        users = ", ".join(sorted({u.name for n in left for u in n.users}))
        raise RuntimeError(
            f"the keys or values of a SalsCache are read by something other than matched attention ({users}); "
            f"use transformers' StaticCache for this model"
        )
    return result


def _keep(writer: _Writer, index: int, cache: CacheWrite, field: str) -> None:
    """The layer stays dense: its buffer is state of ours, written as a static cache's would be."""
    update, virtual = writer.copies[cache.update], writer.copies[cache.buffer]
    buffer = writer.input("kept", index, field)
    update.replace_input_with(virtual, buffer.node)
    _copy_back(writer, buffer, Proxy(update, writer.tracer))


def _copy_back(writer: _Writer, buffer: Any, update: Any) -> None:
    with writer.graph.inserting_before(next(n for n in reversed(writer.graph.nodes) if n.op == "output")):
        torch.ops.aten.copy_.default(buffer, update)


def _short(writer: _Writer, index: int, site: AttentionSite, first: bool, observe: bool) -> Any:
    """Exact attention over buffers of as many slots as the budget has tokens."""
    get = writer.get
    assert site.key_cache is not None
    slots = get(site.key_cache.slots)
    updated = []
    for field, new in zip(("key", "value"), _tokens(writer, site), strict=True):
        buffer = writer.input("short", index, field)
        updated.append(torch.ops.aten.index_copy.default(buffer, 1, slots, new))
        if first:
            _copy_back(writer, buffer, updated[-1])
    if observe:
        writer.call("observe", writer.input("query_moment", index, "moment"), site.query_pre.read(get))
    query, modifier = site.query.read(get), _modifier(site, get)
    return writer.call("dense_attention", query, *updated, *modifier, site.scale, _sinks(site, get))


def _is_plain(site: AttentionSite) -> bool:
    """Whether the site is PyTorch's own operator with a mask over all slots (or none), which can then be asked anew: of
    fewer keys, and without copies of KV heads.
    """
    if site.anchor.target is not SDPA or site.anchor is not site.output:
        return False
    mask = _attention_mask(site.anchor)
    last = 1 if mask is None else mask.meta["val"].shape[-1]
    assert site.key_cache is not None and site.value_cache is not None
    types = {site.dtype, *(c.buffer.meta["val"].dtype for c in (site.key_cache, site.value_cache))}
    return last in (1, site.key_cache.capacity) and len(types) == 1


def _attention_mask(anchor: Node) -> Node | None:
    return anchor.args[3] if len(anchor.args) > 3 else anchor.kwargs.get("attn_mask")  # type: ignore[return-value]


def _plain_attention(writer: _Writer, site: AttentionSite, past: Sequence[Any] | None) -> Any:
    """PyTorch's attention ``[B,L,H,Dv]`` over ``past`` keys and values ``[B,S,N,D]`` with this call's written to them.

    ``past`` None: the cache is empty, and its first tokens attend among themselves. The mask is then cut to them: slots
    never written are not attended by any mask that a cache is used with.
    """
    get = writer.get
    assert site.key_cache is not None
    tokens = _tokens(writer, site)
    mask: Any = _attention_mask(site.anchor)
    if mask is not None:
        whole = past is not None or mask.meta["val"].shape[-1] == 1
        length = None if whole else torch.ops.aten.sym_size.int(tokens[0], 1)
        mask = get(mask) if whole else torch.ops.aten.slice.Tensor(get(mask), -1, 0, length)
    if past is not None:
        slots = get(site.key_cache.slots)
        tokens = [torch.ops.aten.index_copy.default(p, 1, slots, t) for p, t in zip(past, tokens, strict=True)]
    query, key, value = (torch.ops.aten.permute.default(t, [0, 2, 1, 3]) for t in (site.query.read(get), *tokens))
    causal = site.anchor.args[5] if len(site.anchor.args) > 5 else site.anchor.kwargs.get("is_causal", False)
    shared = site.heads != site.kv_heads
    out = SDPA(query, key, value, mask, 0.0, causal, scale=site.scale, enable_gqa=shared)
    return torch.ops.aten.permute.default(out, [0, 2, 1, 3])


def _past(writer: _Writer, index: int, site: AttentionSite, group: RowGroup, short: int, variant: str) -> list[Any]:
    """Dense keys and values ``[B,S,N,D]`` of the tokens before this call."""
    assert site.key_cache is not None
    capacity = site.key_cache.capacity
    if variant == "grow":
        missing = [0, 0, 0, 0, 0, capacity - short]
        buffers = [writer.input("short", index, f) for f in ("key", "value")]
        return [torch.ops.aten.constant_pad_nd.default(buffer, missing) for buffer in buffers]
    latents = [writer.input("latent", index, f) for f in LATENT_FIELDS]
    cos, sin, _, _, ring_slots = (writer.input("rows", group.index, f) for f in ROW_FIELDS)
    _, decoder, transform = (writer.input("basis", index, f) for f in BASIS_FIELDS)
    pair = writer.call("materialize", *latents, ring_slots, cos, sin, decoder, transform, capacity, site.rotary_form)
    return [pair[0], pair[1]]


def _fill_buffers(writer: _Writer, index: int, site: AttentionSite, group: RowGroup, short: int, variant: str) -> None:
    """Dense keys and values before this call, in the place of the buffers that the traced attention reads."""
    caches = [c for c in (site.key_cache, site.value_cache) if c is not None]
    updates = [writer.copies[c.update] for c in caches]
    writer.tracer.origin = site.name
    with writer.graph.inserting_before(min(updates)):
        past = None if variant == "fresh" else _past(writer, index, site, group, short, variant)
        for position, (cache, update) in enumerate(zip(caches, updates, strict=True)):
            like = cache.buffer.meta["val"]
            if past is None:
                options = {"dtype": like.dtype, "device": like.device}
                dense = writer.graph.call_function(torch.ops.aten.full.default, (list(like.shape), 0), options)
            else:
                dense = torch.ops.aten.contiguous.default(cache.layout.from_roles(past[position])).node
            update.replace_input_with(writer.copies[cache.buffer], dense)


def short_slots(plans: Sequence[SitePlan], capacity: int) -> int:
    """Slots of the exact buffers of a short context: the largest budget of a compressed layer."""
    return min(max(p.budget for p in plans if p.site.virtual and p.action != "dense"), capacity)


def _tokens(writer: _Writer, site: AttentionSite) -> list[Any]:
    """This call's keys and values ``[B,L,N,D]`` in the type of the cache."""
    tokens = []
    for operand, cache in ((site.key, site.key_cache), (site.value, site.value_cache)):
        assert cache is not None
        kept = operand.dtype or operand.node.meta["val"].dtype
        token, wanted = operand.read(writer.get), cache.buffer.meta["val"].dtype
        tokens.append(token if kept == wanted else torch.ops.aten._to_copy.default(token, dtype=wanted))
    return tokens


def _store(writer: _Writer, index: int, site: AttentionSite, group: RowGroup, variant: str, fit: int | None) -> None:
    """Encode the tokens of a prefill, the basis made from them first where it is not known yet."""
    get = writer.get
    latents = [writer.input("latent", index, f) for f in LATENT_FIELDS]
    encoder, decoder, transform = (writer.input("basis", index, f) for f in BASIS_FIELDS)
    key_pre = site.key_pre.read(get)
    if fit is not None and variant != "rebuild":
        rows = [writer.input("rows", group.index, f) for f in ("cos", "sin")]
        new = rotary_rows(site, get) if site.key_rotary is not None else (rows[0][:, :0], rows[1][:, :0])
        past = writer.input("short", index, "key") if variant == "grow" else None
        torch.ops.sals.fit_basis.default(encoder, decoder, site.query_pre.read(get), key_pre, *new, past, *rows, fit)
    writer.call(
        "encode", *latents, key_pre, site.key.read(get), site.value.read(get), encoder, transform, site_slots(site, get)
    )
