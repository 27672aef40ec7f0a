"""Translation validation: every match is checked by running it.

For each structurally distinct site, the original subgraph and the record's dense meaning run on the same random data,
of the real shapes and dtypes, and must agree. A site that does not agree is declined with the measured difference. So
matching may be generous: what it misreads is caught here, before anything is rewritten.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels import reference
from ..kernels.index_expr import TRUE, Expr, H, Modifier, Q, const, load, make
from .graph import ancestors
from .ir import AttentionSite, Declined

log = logging.getLogger("sals_compile")

#: Largest ``||record - graph|| / ||graph||`` accepted, by the site's dtype: rounding of that dtype alone.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}

#: Logits of the record evaluated at most; queries are sampled to stay below (the graph itself always runs whole).
MAX_LOGITS = 1 << 23

#: Elements of a site's keys that the record reads in fp32 at once.
MAX_ELEMENTS = 1 << 24


def dense_meaning(
    site: AttentionSite, get: Any, queries: Tensor | None = None, attention: Any = reference.dense_attention
) -> Tensor:
    """What the record says the site computes: ``[B, L, H, Dv]``, from the values that ``get`` gives for the record's
    nodes.

    ``queries`` (indices) restricts the query tokens that are evaluated; ``attention``: by which arithmetic.
    """
    query = site.query.read(get)
    key = site.key_pre.read(get)
    if site.key_rotary is not None:
        cos, sin = rotary_rows(site, get)
        key = reference.apply_rotary(key, cos.unsqueeze(2), sin.unsqueeze(2), site.rotary_form)
    value = site.value.read(get)
    if site.key_cache is not None and site.value_cache is not None:
        slots = site_slots(site, get)
        stored = []
        for cache, new in ((site.key_cache, key), (site.value_cache, value)):
            # A buffer is data of our own, and large: written to as it lies. Not so one that the graph made.
            buffer = cache.layout.to_roles(get(cache.buffer))
            buffer = buffer.clone() if site.born else buffer
            reference._write(buffer, slots, new)
            stored.append(buffer)
        key, value = stored
    tensors = [get(t) for t in site.modifier_tensors]
    integers = [get(i) if isinstance(i, Node) else i for i in site.modifier_integers]
    modifier = site.modifier
    if queries is not None:
        query = query[:, queries]
        rows = len(tensors)
        tensors.append(queries)

        def at_row(node: Expr) -> Expr | None:
            return load(rows, Q) if node == Q else None

        modifier = Modifier(modifier.mask.replace(at_row), modifier.score.replace(at_row))
    sinks = None if site.sink_logits is None else get(site.sink_logits)
    kv_heads, group = key.shape[2], query.shape[2] // key.shape[2]
    # Keys in fp32 are several times the cache itself, so a long one is read a KV head at a time.
    together = kv_heads if key.numel() <= MAX_ELEMENTS else 1
    parts = []
    for n in range(0, kv_heads, together):
        own, shared = slice(n * group, (n + together) * group), slice(n, n + together)
        rule = _from_head(modifier, n * group).serialized
        sink = None if sinks is None else sinks[own]
        heads = (query[:, :, own], key[:, :, shared], value[:, :, shared])
        parts.append(attention(*heads, rule, tensors, integers, site.scale, sink))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def rounded_attention(query: Tensor, *rest: Any) -> Tensor:
    """:func:`reference.dense_attention` whose logits and weights are rounded to the query's dtype, as a graph that
    computes in that dtype rounds them."""
    return reference.rounding_attention(lambda x: x.to(query.dtype).float(), query, *rest)


def _from_head(modifier: Modifier, first: int) -> Modifier:
    """``modifier`` for heads that are counted from ``first``."""
    if first == 0:
        return modifier

    def shifted(node: Expr) -> Expr | None:
        return make("add", H, const(first)) if node == H else None

    return Modifier(modifier.mask.replace(shifted), modifier.score.replace(shifted))


def rotary_rows(site: AttentionSite, get: Any) -> tuple[Any, Any]:
    """The call's rotary rows as the operators take them: ``cos``, ``sin`` ``[P, L, Dr]``."""
    rotary = site.key_rotary
    assert rotary is not None
    rows = [o.layout.to_roles(get(o.node)) for o in (rotary.cos, rotary.sin)]
    rows = [torch.ops.aten.squeeze.dim(r, 2) for r in rows]
    if rotary.pairs and rotary.form == "half":
        rows = [torch.ops.aten.cat.default([r, r], -1) for r in rows]
    elif rotary.pairs:
        rows = [torch.ops.aten.repeat_interleave.self_int(r, 2, -1) for r in rows]
    return rows[0], rows[1]


def site_slots(site: AttentionSite, get: Any) -> Any:
    """The slots written by this call: ``[P, L]``."""
    cache = site.key_cache
    assert cache is not None
    slots = get(cache.slots)
    return torch.ops.aten.unsqueeze.default(slots, 0) if cache.slots_dim == 1 else slots


def boundary_of(site: AttentionSite) -> list[Node]:
    """Where verification cuts the graph: the site's inputs, filled with random data."""
    nodes = [site.query.node, site.key_pre.node]
    # Values that are the rotated keys are computed from the cut there.
    if site.key_rotary is None or site.value.node not in ancestors([site.key.node], nodes):
        nodes.append(site.value.node)
    if not site.born:  # a cache that the graph creates is zeros, not any data
        nodes += [c.buffer for c in (site.key_cache, site.value_cache) if c is not None]
    return list(dict.fromkeys(nodes))


def record_nodes(site: AttentionSite) -> list[Node]:
    """Nodes whose values the record reads, its inputs aside."""
    nodes = list(site.modifier_tensors) + [i for i in site.modifier_integers if isinstance(i, Node)]
    if site.key_rotary is not None:
        nodes += [site.key_rotary.cos.node, site.key_rotary.sin.node]
    if site.key_cache is not None:
        nodes.append(site.key_cache.slots)
    if site.born:
        nodes += [c.buffer for c in (site.key_cache, site.value_cache) if c is not None]
    if site.sink_logits is not None:
        nodes.append(site.sink_logits)
    return nodes


def cone_of(site: AttentionSite) -> list[Node]:
    """The subgraph that verification runs, in graph order."""
    return ancestors([site.output, *record_nodes(site)], boundary_of(site))


def structure(site: AttentionSite, cone: Sequence[Node]) -> str:
    """Hash of everything verification depends on: operators, literals, shapes, dtypes and the record, names aside."""
    number = {node: i for i, node in enumerate(cone)}
    boundary = boundary_of(site)
    cuts = set(boundary)
    digest = hashlib.sha256()

    def name(argument: Node) -> str:
        return f"%{number[argument]}" if argument in number else "%outside"

    for node in cone:
        value = node.meta.get("val")
        kind = (tuple(map(str, value.shape)), str(value.dtype)) if isinstance(value, Tensor) else type(value).__name__
        cut = node in cuts
        inside = "input" if cut or node.op == "placeholder" else (str(node.target), str(map_arg(node.args, name)))
        options = "" if cut else str(map_arg(node.kwargs, name))
        digest.update(repr((kind, inside, options)).encode())
    facts = (
        [name(n) for n in boundary],
        [name(n) for n in record_nodes(site)],
        name(site.output),
        site.query.layout,
        site.key_pre.layout,
        site.value.layout,
        site.output_layout,
        site.scale,
        site.modifier.serialized,
        site.rotary_form,
        site.rotary_dim,
        site.key_rotary is not None and site.key_rotary.pairs,
        [(o.factor, o.dtype) for o in (site.query, site.key_pre, site.value)],
        [(c.layout, c.slots_dim, c.capacity) for c in (site.key_cache, site.value_cache) if c is not None],
        [i for i in site.modifier_integers if not isinstance(i, Node)],
        site.heads,
        site.kv_heads,
    )
    digest.update(repr(facts).encode())
    return digest.hexdigest()


class _NoRotation(Exception):
    """What was carried as a rotation does not keep angles, so that it may not be undone."""


def _check_carried(site: AttentionSite, get: Any) -> None:
    """Each pair of a carried rotation must be a rotation, times a factor: stored keys are un-rotated by its inverse."""
    if site.key_rotary is None or not site.key_rotary.carried:
        return
    cos, sin = (r.float() for r in rotary_rows(site, get))
    other_cos, other_sin = (reference._swap_pairs(r, site.rotary_form) for r in (cos, sin))
    size = (cos.square() + sin.square()).sqrt()
    apart = torch.maximum((cos - other_cos).abs(), (sin - other_sin).abs())
    if not bool((apart <= 10 * TOLERANCE[site.dtype] * size).all()) or not bool((size > 1e-3 * size.mean()).all()):
        raise _NoRotation


def _uncarried(site: AttentionSite) -> AttentionSite:
    note = "what turns the key is no rotation, so its latent is taken after the turn"
    return replace(site, key_rotary=None, query_rotary=None, projection=None, note=note)


def verify(sites: list[AttentionSite], example: Mapping[Node, Any]) -> tuple[dict[str, float], list[Declined]]:
    """Measured relative error by site name, and the sites to decline. ``example`` maps graph inputs to values seen by
    the compiler. In ``sites``, a rotation that was carried and is none is taken back."""
    errors: dict[str, float] = {}
    declined: list[Declined] = []
    known: dict[str, tuple[float, str] | None] = {}

    def compared(site: AttentionSite) -> tuple[float, str] | None:
        cone = cone_of(site)
        key = structure(site, cone)
        if key not in known:
            try:
                known[key] = _compare(site, cone, example)
            except _NoRotation:
                known[key] = None
        return known[key]

    for index, site in enumerate(sites):
        result = compared(site)
        if result is None:
            sites[index] = site = _uncarried(site)
            result = compared(site)
        error, problem = result or (float("nan"), "")
        tolerance = TOLERANCE[site.dtype]
        if not problem and not error <= tolerance:
            problem = (
                f"verification failed: relative error {error:.2e} over the tolerance {tolerance:.0e} of {site.dtype}"
            )
        if problem:
            declined.append(Declined(site.name, "verification", problem, node=site.output.name, depth=99))
        else:
            errors[site.name] = error
    return errors, declined


def _compare(site: AttentionSite, cone: Sequence[Node], example: Mapping[Node, Any]) -> tuple[float, str]:
    """The largest relative error over two draws: once with the inputs seen, once with other positions and masks."""
    worst, compared = 0.0, 0
    generator = torch.Generator().manual_seed(0)
    # The compiler traces under a fake mode; verification computes with real data.
    with torch.no_grad(), _disable_current_modes():
        for variation in (False, True):
            try:
                error = _run(site, cone, example, generator, variation)
            except _NoRotation:
                raise
            except Exception as failure:
                if variation:
                    continue  # the variation left the graph's own domain (a position past a table, say)
                log.debug("verification of %s could not run", site.name, exc_info=failure)
                return float("nan"), f"verification could not run: {type(failure).__name__}: {failure}"
            if error is not None:
                compared += 1
                worst = max(worst, error) if error == error else error
    return (worst, "") if compared else (float("nan"), "verification found no query with a key to attend")


def _run(
    site: AttentionSite,
    cone: Sequence[Node],
    example: Mapping[Node, Any],
    generator: torch.Generator,
    variation: bool,
) -> float | None:
    cut = set(boundary_of(site))
    kept = {site.output, site.query.node, site.key_pre.node, site.value.node, *cut, *record_nodes(site)}
    last = {used: node for node in cone for used in node.all_input_nodes}
    values: dict[Node, Any] = {}
    for node in cone:
        if node in cut:
            values[node] = _random(node, generator)
        elif node.op == "placeholder":
            values[node] = _input(node, example.get(node), generator, variation, site)
        elif node.op == "get_attr":
            values[node] = _attribute(node)
        else:
            arguments = map_arg(node.args, lambda n: values[n])
            options = map_arg(node.kwargs, lambda n: values[n])
            values[node] = node.target(*arguments, **options)  # type: ignore[operator]
            del arguments, options
            for used in node.all_input_nodes:
                if last[used] is node and used not in kept:
                    del values[used]
    get = values.__getitem__
    _check_carried(site, get)
    expected = site.output_layout.to_roles(values[site.output]).float()
    batch, length, heads = expected.shape[:3]
    keys = site.key_cache.capacity if site.key_cache is not None else values[site.key_pre.node].numel()
    limit = max(4, MAX_LOGITS // max(1, batch * heads * min(keys, 1 << 20)))
    rows = torch.arange(length, device=expected.device)
    if length > limit:
        picks = torch.randperm(length, generator=generator)[: limit - 2].to(rows.device)
        rows = torch.cat((rows[:1], rows[-1:], picks)).unique()
    actual = dense_meaning(site, get, rows).float()
    expected = expected[:, rows]
    # A query with every key masked has no defined output (contract): the record gives zeros; dense spellings give NaN,
    # zeros, or (a finite fill) the mean of all values, or attention as if nothing were masked. Any other value there is
    # a disagreement.
    empty = (actual == 0).all(-1, keepdim=True)
    if empty.any():
        undefined = expected.isnan().any(-1, keepdim=True) | (expected == 0).all(-1, keepdim=True)
        unmasked = replace(site, modifier=replace(site.modifier, mask=TRUE))
        flat = replace(
            site, modifier=Modifier(), scale=0.0, modifier_tensors=(), modifier_integers=(), sink_logits=None
        )
        for other in (flat, unmasked):
            value = dense_meaning(other, get, rows).float()
            near = (expected - value).norm(dim=-1, keepdim=True) <= 2e-2 * value.norm(dim=-1, keepdim=True)
            undefined = undefined | near
        empty = empty & undefined
    if empty.all():
        return None
    norm = torch.where(empty, 0.0, expected).norm().clamp_min(1e-30)

    def error(found: Tensor) -> float:
        return float(torch.where(empty, 0.0, found - expected).norm() / norm)

    exact = error(actual)
    if site.dtype == torch.float32 or exact <= TOLERANCE[site.dtype]:
        return exact
    # Large logits in half precision (scores that are not scaled, say): the graph's own rounding may be over the
    # tolerance, and the record rounded alike is then near it. What is misread is near it neither way.
    return min(exact, error(dense_meaning(site, get, rows, rounded_attention).float()))


def _concrete(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _random(node: Node, generator: torch.Generator) -> Tensor:
    value = node.meta["val"]
    shape = [_concrete(s) for s in value.shape]
    dtype = value.dtype if value.dtype.is_floating_point else torch.float32
    # Drawn where it is used: a cache has hundreds of millions of elements.
    own = torch.Generator(value.device).manual_seed(int(torch.randint(1 << 31, (), generator=generator)))
    return torch.randn(shape, generator=own, dtype=dtype, device=value.device).to(value.dtype)


def _input(node: Node, seen: Any, generator: torch.Generator, variation: bool, site: AttentionSite) -> Any:
    """A graph input: as seen, or (``variation``) with other positions and other masks."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return _concrete(value) if seen is None or isinstance(seen, torch.SymInt) else seen
    usable = isinstance(seen, Tensor) and not isinstance(seen, torch._subclasses.FakeTensor)
    if not usable:
        if value.dtype.is_floating_point:
            return _random(node, generator)
        seen = torch.zeros([_concrete(s) for s in value.shape], dtype=value.dtype, device=value.device)
        if seen.dim() and value.dtype != torch.bool:
            seen = seen + torch.arange(seen.shape[-1], device=value.device, dtype=value.dtype)
    if not variation:
        return seen.detach()
    if seen.dtype == torch.bool or (not seen.dtype.is_floating_point and _is_flags(seen)):
        flags = torch.rand(seen.shape, generator=generator) < 0.8
        return flags.to(device=seen.device, dtype=seen.dtype)
    if not seen.dtype.is_floating_point and site.key_cache is not None:
        # Positions: shift them all by one amount that keeps the last of them inside the cache.
        length = _concrete(site.key_cache.new.meta["val"].numel()) // (site.joint_width or 1)
        room = site.key_cache.capacity - int(seen.max()) - max(1, length) if seen.numel() else 0
        if room > 0:
            return seen + int(torch.randint(1, room + 1, (), generator=generator))
    return seen.detach()


def _is_flags(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and tensor.numel() > 1 and bool(((tensor == 0) | (tensor == 1)).all())


def _attribute(node: Node) -> Any:
    module: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        module = getattr(module, part)
    return module
