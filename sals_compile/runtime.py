"""The compiled callable: one Dynamo graph, its variants, and the choice between them at every call.

A graph with adopted caches has a ``dense`` variant (exact; records rotary rows and query moments) and a ``sparse`` one.
Which runs is decided from what the host knows without asking the device: the cache's phase, an upper bound of its
tokens, the number of new tokens. The change from dense to sparse is one import between calls. The dense buffers stay
written (a mirror), so that going back to dense is always right: after ``reset()``, after somebody else wrote to them,
for a long prefill.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from .cache import (
    AdoptedCache,
    Latents,
    QueryFactors,
    Rows,
    SiteMemory,
    StorageDict,
    blank_basis,
    buffer_key,
    import_dense,
    make_basis,
    pre_rotary_keys,
    storage_key,
)
from .config import SalsConfig
from .kernels import ops, reference
from .kernels.inductor import compile_context
from .passes.graph import ancestors
from .passes.ir import AttentionSite, Projection, SitePlan
from .passes.lower import boxed, lower
from .passes.rewrite import Rewritten, RowGroup, StateInput, rewrite_dense, rewrite_sparse
from .passes.verify import rotary_rows

log = logging.getLogger("sals_compile")


class Registry:
    """State shared by the graphs of one configuration: adopted caches by storage, site memories by (weight storage,
    site).
    """

    def __init__(self) -> None:
        self.caches = StorageDict()
        self.memories = StorageDict()
        self.lock = threading.RLock()

    def memory(self, owner: Tensor, name: str) -> SiteMemory:
        """The memory of site ``name`` of the model that owns parameter ``owner``."""
        sites: dict[str, SiteMemory] | None = self.memories.get(owner)
        if sites is None:
            sites = {}
            self.memories.set(owner, sites)
        return sites.setdefault(name, SiteMemory())


def query_factors(
    registry: Registry,
    config: SalsConfig,
    site: AttentionSite,
    found: Projection,
    weight: Tensor,
    gain: Tensor | None,
    rank: int | float | None = None,
) -> QueryFactors:
    """Factors of a site's query projection, kept with the model that owns the weight ``[O,I]``."""
    assert found.product is not None and config.query_rank is not None
    known = None if config.calibration is None else config.calibration.projected(site.name, weight.shape[0])
    rank = config.query_rank if rank is None else rank
    dtype = found.product.meta["val"].dtype
    return registry.memory(weight, site.name).query_factors(rank, weight, known, gain, dtype)


def _integer_input(position: int, args: Sequence[Any]) -> int:
    return int(args[position])


def _dim_of_input(position: int, dim: int, args: Sequence[Any]) -> int:
    return args[position].shape[dim]


def _stride_of_input(position: int, dim: int, args: Sequence[Any]) -> int:
    return args[position].stride(dim)


def _offset_of_input(position: int, args: Sequence[Any]) -> int:
    return args[position].storage_offset()


class SizeReader:
    """Evaluates traced sizes (symbols of the shape environment) from the integers and shapes of a call's inputs."""

    def __init__(self, placeholders: Sequence[Node]) -> None:
        self.sources: dict[Any, Callable[[Sequence[Any]], int]] = {}
        for position, node in enumerate(placeholders):
            value = node.meta.get("val")
            self._learn(value, partial(_integer_input, position))
            if isinstance(value, Tensor):
                for dim, size in enumerate(value.shape):
                    self._learn(size, partial(_dim_of_input, position, dim))
                for dim, stride in enumerate(value.stride()):
                    self._learn(stride, partial(_stride_of_input, position, dim))
                self._learn(value.storage_offset(), partial(_offset_of_input, position))

    def _learn(self, size: Any, read: Callable[[Sequence[Any]], int]) -> None:
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
            self.sources.setdefault(size.node.expr, read)

    def substitute(self, expression: Any, args: Sequence[Any]) -> Any:
        """A sympy expression over the graph's symbols with the call's values put in."""
        return expression.xreplace(
            {s: _integer(self.sources[s](args)) for s in expression.free_symbols if s in self.sources}
        )

    def __call__(self, size: Any, args: Sequence[Any]) -> int:
        if isinstance(size, int):
            return size
        return int(self.substitute(size.node.expr, args))


def _integer(value: int) -> Any:
    import sympy

    return sympy.Integer(value)


class Variant:
    """One lowered variant and the symbolic guards that its compilation added."""

    def __init__(self, rewritten: Rewritten, call: Callable[[list[Any]], Any], guards: list[Any]) -> None:
        self.rewritten = rewritten
        self.call = call
        self.guards = guards


class CompiledGraph:
    """What the backend gives AOT for one graph. Called with the list of graph inputs."""

    _boxed_call = True

    def __init__(
        self,
        gm: GraphModule,
        plans: Sequence[SitePlan],
        groups: Sequence[RowGroup],
        config: SalsConfig,
        registry: Registry,
        example: dict[Node, Any],
        mode: str | None,
    ) -> None:
        self.gm, self.plans, self.groups, self.config, self.registry, self.mode = (
            gm,
            plans,
            groups,
            config,
            registry,
            mode,
        )
        self.placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.position = {n: i for i, n in enumerate(self.placeholders)}
        self.sizes = SizeReader(self.placeholders)
        self.active = [i for i, p in enumerate(plans) if p.action != "dense"]
        self.cached = [i for i in self.active if plans[i].site.cached]
        self.rotary = tuple((plans[i].site.rotary_form, plans[i].site.rotary_dim) for i in self.cached)
        self.stateless = [i for i in self.active if not plans[i].site.cached]
        #: positions of the weights whose query projections are factored
        self.factored = [
            self.position[p.low_rank_query.projection.weight] for p in plans if p.low_rank_query is not None
        ]
        self.variants: dict[Any, Variant] = {}
        self.fake_mode = torch._guards.detect_fake_mode([n.meta.get("val") for n in self.placeholders])
        self.outputs = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0]
        self.pending: tuple[AdoptedCache, list[Tensor], list[Tensor]] | None = None
        self.warned: set[str] = set()
        self.unspecialised: dict[Variant, Variant] = {}
        # Parameters and KV buffers never move, so CUDA graphs may bake their addresses in.
        written = {c.owner for p in plans for c in (p.site.key_cache, p.site.value_cache) if c is not None}
        self.static = {
            i
            for i, n in enumerate(self.placeholders)
            if n in written or isinstance(example.get(n), torch.nn.Parameter) or _marked_static(example.get(n))
        }
        # AOT calls us under its fake mode; state is real.
        with _disable_current_modes():
            self._prepare(example)

    def _prepare(self, example: dict[Node, Any]) -> None:
        plans, registry, config = self.plans, self.registry, self.config
        self.memories: dict[int, SiteMemory] = {}
        #: by site, the position of the parameter whose storage identifies the model
        self.owner_of: dict[int, int] = {}
        self.owner: tuple[int, ...] = ()
        for index, entry in enumerate(plans):
            node = self._owner(entry, example)
            if node is not None and isinstance(example[node], torch.nn.Parameter):
                self.owner_of[index] = self.position[node]
            else:  # what passes is not the model's: its memory lives with this graph
                owner = torch.empty(1) if node is None else example[node]
                self.memories[index] = registry.memory(owner, entry.site.name)
                self._install_known_basis(index, example)
        self.observes = (
            bool(self.active)
            and config.attention != "exact"
            and config.calibration is None
            and (config.basis == "query_weighted" or bool(self.stateless))
        )
        #: positions of the inputs that slots are computed from, where sites of one row group have slots of their own
        self.counters: list[int] = []
        self.recount = True
        for group in self.groups:
            nodes = dict.fromkeys(self._cache_of(i, "key_cache").slots for i in group.sites)
            if len(nodes) > 1:
                feeding = ancestors(nodes, [])
                self.counters += [
                    self.position[n] for n in feeding if n.op == "placeholder" and isinstance(n.meta.get("val"), Tensor)
                ]
        self._follow_model([example.get(n) for n in self.placeholders])
        if self._symbolic():
            self._compile_ahead()

    def _follow_model(self, args: Sequence[Any]) -> None:
        """What is known of each site is of the weights that a call passes: models, or layers compiled one by one, may
        share a graph.
        """
        key = tuple(storage_key(args[p]) for p in self.owner_of.values())
        if key == self.owner:
            return
        self.owner = key
        for index, position in self.owner_of.items():
            self.memories[index] = self.registry.memory(args[position], self.plans[index].site.name)
            self._install_known_basis(index, dict(zip(self.placeholders, args, strict=True)))

    def _compile_ahead(self) -> None:
        """Guards on symbols must reach Dynamo's own, so variants of dynamic graphs are compiled while it still
        traces."""
        if not self.cached:
            self._variant("sparse", {}, None)
        self._variant("dense", {}, None)

    # ---- what is known at compile time ------------------------------------------------------------------------------

    def _symbolic(self) -> bool:
        """Whether a symbol reaches the computation. A slice of the prompt, one token wide, has a symbolic stride."""
        used = [n.meta.get("val") for n in self.gm.graph.nodes if n.users]
        return any(
            isinstance(v, torch.SymInt)
            or (isinstance(v, Tensor) and any(isinstance(size, torch.SymInt) for size in v.shape))
            for v in used
        )

    def _owner(self, plan: SitePlan, example: dict[Node, Any]) -> Node | None:
        """The input whose storage identifies the model: the key projection's weight, else the graph's first parameter,
        else its first floating input.
        """
        site = plan.site
        candidates = [site.projection.weight] if site.projection is not None else []
        written = {c.owner for p in self.plans for c in (p.site.key_cache, p.site.value_cache) if c is not None}
        candidates += [
            n for n in self.placeholders if n not in written and isinstance(example.get(n), torch.nn.Parameter)
        ]
        candidates += [n for n in self.placeholders if n not in written]
        for node in candidates:
            tensor = example.get(node)
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                return node
        return None

    def _install_known_basis(self, index: int, example: dict[Node, Any]) -> None:
        """Bases that need no observation: exact mode, a calibration, or the projection's weights."""
        plan, memory = self.plans[index], self.memories[index]
        device = plan.site.output.meta["val"].device
        if memory.ready or index not in self.active:
            return
        if plan.action == "exact":
            memory.install(None, plan, self.config, device)
        elif self.config.calibration is not None:
            projection = self._projection(plan, example)
            weight = None if projection is None else projection[0]
            basis = self.config.calibration.basis(plan.site.name, self.config.basis, plan.rank, weight=weight)
            memory.install(basis, plan, self.config, device)
        elif self.config.basis == "weights":
            projection = self._projection(plan, example)
            if projection is not None:
                memory.install(make_basis(memory, plan, self.config, None, projection), plan, self.config, device)

    def _projection(self, plan: SitePlan, example: dict[Node, Any]) -> tuple[Tensor, Tensor | None] | None:
        found = plan.site.projection
        if found is None or not isinstance(example.get(found.weight), Tensor):
            return None
        weight = example[found.weight].detach()
        if found.transposed:
            weight = weight.T
        if found.rows is not None:
            weight = weight[found.rows[0] : found.rows[1]]
        if weight.shape[0] != plan.site.joint_width:
            return None
        return weight, None if found.norm is None else example[found.norm].detach()

    # ---- a call -----------------------------------------------------------------------------------------------------

    def __call__(self, args: list[Any]) -> Any:
        with self.registry.lock:
            args = list(args)
            with torch.no_grad():
                self._follow_model(args)
            if self.cached:
                return self._call_cached(args)
            if self.stateless:
                return self._call_stateless(args)
            return self._run("dense", args, None)

    def _call_stateless(self, args: list[Any]) -> Any:
        ready = all(self.memories[i].ready for i in self.stateless)
        if self.config.attention == "exact":
            return self._run("sparse", args, None)
        keys = max(self._keys(i, args) for i in self.stateless)
        if keys <= self.config.budget:
            return self._run("dense", args, None)
        if not ready:
            outputs = self._run("dense", args, None)
            for index in self.stateless:
                plan, memory = self.plans[index], self.memories[index]
                basis = make_basis(memory, plan, self.config, None, None)
                memory.install(basis, plan, self.config, plan.site.output.meta["val"].device)
            return outputs
        return self._run("sparse", args, None)

    def _keys(self, index: int, args: Sequence[Any]) -> int:
        site = self.plans[index].site
        total = site.key_pre.node.meta["val"].numel()
        batch = site.output.meta["val"].numel()
        tokens = self.sizes(total, args) // site.joint_width
        rows = self._batch(site.output_layout, site.output, args)
        return tokens // max(1, rows) if batch else tokens

    def _batch(self, layout: Any, node: Node, args: Sequence[Any]) -> int:
        shape = node.meta["val"].shape
        size, number = 1, 0
        for dim, factors in enumerate(layout.parts):
            for factor in factors:
                if number in layout.order[0]:
                    known = 1
                    for other in factors:
                        known *= other or 1
                    size *= factor if factor is not None else self.sizes(shape[dim], args) // known
                number += 1
        return size

    def _call_cached(self, args: list[Any]) -> Any:
        keys, values, born = self._buffers(args)
        buffers = [*keys, *values]
        fresh = self._new_tokens(args)
        cache = None if born else self._find(keys)
        if cache is None:
            cache = self._adopt(keys, args, born)
            cache.tokens = 0 if born else int(self._read_slots(args).min())
        if cache.owner != self.owner:
            # Latents in another model's basis mean nothing to this one; the dense buffers mean what they say.
            cache.phase, cache.owner = "dense", self.owner
            cache.inputs.clear()
        self._check_counters(cache, args)
        if not born:
            self._check_room(cache, fresh, args)
            self._choose_phase(cache, keys, values, fresh, args)
        sparse = cache.phase == "sparse" and fresh <= self.config.decode_tokens and not born
        if cache.phase == "sparse" and not sparse:
            # A long prefill is exact; the buffers are up to date, and the next decode imports them.
            cache.phase = "dense"
        outputs = self._run("sparse" if sparse else "dense", args, cache)
        cache.tokens += fresh
        cache.calls += 1
        if born:
            keys = [outputs[p] for p in self._born_outputs("key_cache")]
            values = [outputs[p] for p in self._born_outputs("value_cache")]
            self._rekey(cache, keys)
            buffers = [*keys, *values]
        self.pending = (cache, buffers, [args[p] for p in self.counters])
        return outputs

    def inspect(self, args: Sequence[Any]) -> None:
        """Before AOT's prologue, which counts our own writes: notice whether somebody else wrote to the buffers."""
        if self.cached:
            keys, values, born = self._buffers(args)
            cache = None if born else self._find(keys)
            if cache is not None and cache.touched([*keys, *values]):
                cache.forget()
                cache.tokens = int(self._read_slots(args).min())
            counters = [args[p] for p in self.counters]
            self.recount = cache is None or cache.recounted(counters)

    def settle(self) -> None:
        """After AOT's epilogue: remember the buffers' versions."""
        if self.pending is not None:
            cache, buffers, counters = self.pending
            self.pending = None
            cache.record_versions(buffers, counters)
            if cache.refused:
                self._warn(cache.refused)

    def _buffers(self, args: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], bool]:
        born = any(self._cache_of(i, "key_cache").owner not in self.position for i in self.cached)
        if born:
            return [], [], True
        keys = [self._buffer(i, "key_cache", args) for i in self.cached]
        values = [self._buffer(i, "value_cache", args) for i in self.cached]
        return keys, values, False

    def _buffer(self, index: int, kind: str, args: Sequence[Any]) -> Tensor:
        """A site's dense buffer: an input, or the part of a pool that is its layer's."""
        cache = self._cache_of(index, kind)
        tensor = args[self.position[cache.owner]]
        for dim, at in cache.place:
            tensor = tensor.select(dim, at)
        return tensor

    def _cache_of(self, index: int, kind: str) -> Any:
        return getattr(self.plans[index].site, kind)

    def _born_outputs(self, kind: str) -> list[int]:
        return [list(self.outputs).index(self._cache_of(i, kind).update) for i in self.cached]

    def _new_tokens(self, args: Sequence[Any]) -> int:
        cache = self._cache_of(self.cached[0], "key_cache")
        slots = cache.slots.meta["val"]
        return self.sizes(slots.shape[-1], args)

    def _find(self, keys: Sequence[Tensor]) -> AdoptedCache | None:
        found = [self.registry.caches.get(k) for k in keys]
        cache = found[0]
        if cache is None or any(f is not cache for f in found):
            return None
        if cache.rotary != self.rotary:  # a graph that rotates in another way cannot go on with these rows
            return None
        return cache if cache.keys == {storage_key(k) for k in keys} else None

    def _adopt(self, keys: Sequence[Tensor], args: Sequence[Any], born: bool) -> AdoptedCache:

        rows, rows_of = [], {}
        for group in self.groups:
            site = self.plans[group.sites[0]].site
            assert site.key_cache is not None
            device = site.output.meta["val"].device
            allocated = Rows.allocate(
                site, self._position_batch(group, args), site.key_cache.capacity, self.config, device
            )
            rows.append(allocated)
            for index in group.sites:
                at = index if born else buffer_key(keys[self.cached.index(index)])
                rows_of[at] = allocated
        cache = AdoptedCache(keys, rows, rows_of, self.rotary)
        for key in keys:
            self.registry.caches.set(key, cache)
        return cache

    def _rekey(self, cache: AdoptedCache, keys: Sequence[Tensor]) -> None:
        """A cache created by this call: known from now on by the buffers that the graph returned."""

        cache.inputs.clear()
        cache.rows_of = {buffer_key(k): cache.rows_of[i] for i, k in zip(self.cached, keys, strict=True)}
        cache.keys = {storage_key(k) for k in keys}
        for key in keys:
            self.registry.caches.set(key, cache)

    def _position_batch(self, group: RowGroup, args: Sequence[Any]) -> int:
        """``P``: 1 when slots and rotary rows are shared by the batch."""
        site = self.plans[group.sites[0]].site
        batch = 1
        if site.key_cache is not None and site.key_cache.slots_dim == 2:
            batch = self.sizes(site.key_cache.slots.meta["val"].shape[0], args)
        if site.key_rotary is not None:
            for operand in (site.key_rotary.cos, site.key_rotary.sin):
                batch = max(batch, self._batch(operand.layout, operand.node, args))
        return batch

    # ---- phases -----------------------------------------------------------------------------------------------------

    def _read_slots(self, args: Sequence[Any]) -> Tensor:
        """The slots that this call writes, computed from its inputs. Waits for the device: only where a phase may
        change.
        """
        return self._evaluate(self._cache_of(self.cached[0], "key_cache").slots, args)

    def _check_counters(self, cache: AdoptedCache, args: Sequence[Any]) -> None:
        """Layers that count their tokens for themselves and share rows must stand at the same slots.

        Looked at when a cache is new and whenever somebody else wrote to a counter; our own graphs advance them alike.
        """
        if not (self.counters and self.recount):
            return
        for group in self.groups:
            nodes = dict.fromkeys(self._cache_of(i, "key_cache").slots for i in group.sites)
            slots = [self._evaluate(n, args) for n in nodes]
            if any(not torch.equal(slots[0], s) for s in slots[1:]):
                cache.forget()
                cache.refused = (
                    "layers of the KV cache stand at different positions, so they cannot share rotary rows; attention "
                    "over it stays dense. Reset the cache."
                )
                return

    def _evaluate(self, node: Node, args: Sequence[Any]) -> Tensor:
        """The value of an integer node, from the inputs of a call."""
        values: dict[Node, Any] = {}
        for step in ancestors([node], []):
            if step.op == "placeholder":
                values[step] = args[self.position[step]]
            elif step.op == "get_attr":
                values[step] = getattr(self.gm, str(step.target))
            else:
                values[step] = step.target(  # type: ignore[operator]
                    *map_arg(step.args, lambda n: values[n]), **map_arg(step.kwargs, lambda n: values[n])
                )
        return values[node]

    def _check_room(self, cache: AdoptedCache, fresh: int, args: Sequence[Any]) -> None:
        capacity = min(self._cache_of(i, "key_cache").capacity for i in self.cached)
        if cache.tokens + fresh <= capacity:
            return
        last = int(self._read_slots(args).max()) + 1
        if last > capacity:
            raise IndexError(
                f"KV cache is full: this call writes up to slot {last - 1} and the cache has {capacity}; create it "
                f"with a larger max_cache_len, or reset it"
            )
        cache.tokens = last - fresh

    def _choose_phase(
        self, cache: AdoptedCache, keys: Sequence[Tensor], values: Sequence[Tensor], fresh: int, args: Sequence[Any]
    ) -> None:
        """Import the dense buffers when this call can decode sparsely and they hold more than the budget."""
        if cache.phase == "sparse" or fresh > self.config.decode_tokens or cache.refused:
            return
        exact = self.config.attention == "exact"
        threshold = 0 if exact else self.config.budget
        if cache.tokens <= threshold:
            return
        start = int(self._read_slots(args).min())
        cache.tokens = start
        if start <= threshold:
            return
        for group in self.groups:
            rows = self._rows_of(cache, group.sites[0], keys)
            if self.plans[group.sites[0]].site.key_rotary is None or bool(rows.written()[:start].all()):
                continue
            if cache.calls == 0:
                return  # buffers that are replaced or rewritten before every call (beam search) are not worth importing
            missing = int((~rows.written()[:start]).sum())
            if not self._recall_rows(group, rows, start, args):
                cache.refused = (
                    f"{missing} of {start} cached tokens were not written by this compiled model; attention over them "
                    f"stays dense. Prefill through the compiled model, or reset the cache."
                )
                return
            log.info("%d of %d cached tokens were written by somebody else", missing, start)
        self._import(cache, keys, values, start)

    def _recall_rows(self, group: RowGroup, rows: Rows, start: int, args: Sequence[Any]) -> bool:
        """Rotary rows of tokens that somebody else wrote: this graph's own, asked for earlier positions.

        Whatever rows are recorded for a token, its stored key is un-rotated and rotated again by the same ones, so the
        import loses nothing by them; those of its true position make it compress best. False where this graph cannot
        tell: its rows do not follow from integer inputs that also give the slots.
        """
        site = self.plans[group.sites[0]].site
        assert site.key_rotary is not None and site.key_cache is not None
        wanted = [site.key_rotary.cos.node, site.key_rotary.sin.node, site.key_cache.slots]
        counts = [
            {
                self.position[n]
                for n in ancestors([node], [])
                if n.op == "placeholder" and isinstance(n.meta["val"], Tensor) and not n.meta["val"].is_floating_point()
            }
            for node in wanted
        ]
        if not all(counts):
            return False  # rows that enter the graph as they are
        moving = set().union(*counts)
        known = self._evaluate(site.key_cache.slots, args)
        length = known.shape[-1]
        for back in range(length, start + length, length):
            shifted = [a - back if i in moving else a for i, a in enumerate(args)]
            try:
                cos, sin, slots = (self._evaluate(n, shifted) for n in wanted)
            except (IndexError, RuntimeError):
                return False  # a table of rows has none for a negative position (left padding)
            if not torch.equal(slots, known - back):
                return False
            values = dict(zip(wanted, (cos, sin, slots), strict=True))
            new_cos, new_sin = rotary_rows(site, values.__getitem__)
            slots = slots if slots.dim() == 2 else slots[None]
            inside = slots[0] >= 0
            new = (new_cos[:, inside], new_sin[:, inside], slots[:, inside])
            ops.operator("record_rows")(rows.cos, rows.sin, rows.block_cos, rows.block_sin, rows.ring_slots, *new)
        return bool(rows.written()[:start].all())

    def _warn(self, message: str) -> None:
        if message not in self.warned:
            self.warned.add(message)
            log.warning("%s", message)

    def _rows_of(self, cache: AdoptedCache, index: int, keys: Sequence[Tensor]) -> Rows:

        return cache.rows_of[buffer_key(keys[self.cached.index(index)])]

    def _import(self, cache: AdoptedCache, keys: Sequence[Tensor], values: Sequence[Tensor], count: int) -> None:

        with torch.no_grad():
            done: set[tuple[int, int]] = set()
            for position, index in enumerate(self.cached):
                plan, memory = self.plans[index], self.memories[index]
                site = plan.site
                assert site.key_cache is not None and site.value_cache is not None
                at = buffer_key(keys[position])
                if at in done:
                    continue
                done.add(at)
                rows = cache.rows_of[at]
                key = site.key_cache.layout.to_roles(keys[position])
                value = site.value_cache.layout.to_roles(values[position])
                slots = torch.arange(count, device=key.device)
                if not memory.ready:
                    memory.key_moment = None
                    moment = memory.moment(site, "key_moment", key.device)
                    reference.observe_keys(moment, pre_rotary_keys(site, key[:, slots], rows, slots))
                    memory.install(make_basis(memory, plan, self.config, rows, None), plan, self.config, key.device)
                latents = cache.latents.get(at)
                if latents is None:
                    capacity = site.key_cache.capacity
                    latents = Latents.allocate(plan, key.shape[0], capacity, self.config, key.device)
                    cache.latents[at] = latents
                import_dense(plan, key, value, rows, latents, memory, slots)
            for rows in cache.rows:
                rows.hold_last(count)
        cache.phase = "sparse"
        cache.inputs.clear()
        log.info("imported %d cached tokens of %d sites into latents", count, len(self.cached))

    # ---- variants ---------------------------------------------------------------------------------------------------

    def _state(self, entry: StateInput, cache: AdoptedCache | None, args: Sequence[Any]) -> Tensor:
        """The tensor behind one extra input."""
        if entry.kind == "rows":
            assert cache is not None
            return getattr(self._group_rows(cache, entry.owner, args), entry.field)
        if entry.kind in ("query_moment", "key_moment"):
            site = self.plans[entry.owner].site
            return self.memories[entry.owner].moment(site, entry.kind, site.output.meta["val"].device)
        if entry.kind == "basis":
            tensors = self.memories[entry.owner].tensors
            if tensors:
                return tensors[entry.field]
            # A dynamic graph's sparse variant is compiled before its basis is known.
            plan = self.plans[entry.owner]
            return blank_basis(plan, entry.field, plan.site.output.meta["val"].device)
        if entry.kind == "query":
            return getattr(self._query_factors(entry.owner, args), entry.field)
        assert cache is not None

        key = self._buffer(entry.owner, "key_cache", args)
        return getattr(cache.latents[buffer_key(key)], entry.field)

    def _follow_weights(self, cache: Any, args: Sequence[Any]) -> None:
        """Ask for a cache's state anew when a weight whose query projection is factored was written to or replaced."""
        stamp = [(args[p]._version, args[p].data_ptr()) for p in self.factored]
        if cache.stamps.get(self, []) != stamp:
            cache.stamps[self] = stamp
            cache.inputs.clear()

    def _query_factors(self, index: int, args: Sequence[Any]) -> QueryFactors:
        """Of the weight that this call passes: layers compiled one by one may share a graph."""
        plan = self.plans[index]
        assert plan.low_rank_query is not None
        found = plan.low_rank_query.projection
        weight = found.read(args[self.position[found.weight]])
        gain = None if found.norm is None else args[self.position[found.norm]].detach()
        return query_factors(self.registry, self.config, plan.site, found, weight, gain, plan.low_rank_query.rank)

    def _group_rows(self, cache: AdoptedCache, group: int, args: Sequence[Any]) -> Rows:
        index = self.groups[group].sites[0]
        if self._cache_of(index, "key_cache").owner not in self.position:
            return cache.rows_of[index]

        return cache.rows_of[buffer_key(self._buffer(index, "key_cache", args))]

    def _run(self, name: str, args: list[Any], cache: AdoptedCache | None) -> Any:
        variant = self._variant(name, {"cache": cache}, args)
        if any(not self._holds(g, args) for g in variant.guards):
            variant = self._variant("dense", {"cache": cache}, args)
            if any(not self._holds(g, args) for g in variant.guards):
                variant = self._unspecialised(variant)
            if cache is not None:
                cache.phase = "dense"
        if cache is None:
            extra = [self._state(e, None, args) for e in variant.rewritten.inputs]
        else:  # hundreds of tensors that stay the same from token to token
            self._follow_weights(cache, args)
            if variant not in cache.inputs:
                cache.inputs[variant] = [self._state(e, cache, args) for e in variant.rewritten.inputs]
            extra = cache.inputs[variant]
        return variant.call([*args, *extra])

    def _unspecialised(self, variant: Variant) -> Variant:
        """The same graph run node by node, for a call that the compiled one assumed away."""
        return self.unspecialised.setdefault(variant, Variant(variant.rewritten, boxed(variant.rewritten.gm), []))

    def _holds(self, guard: Any, args: Sequence[Any]) -> bool:
        value = self.sizes.substitute(guard, args)
        return bool(value == True)  # noqa: E712  (sympy's true is not Python's)

    def rewrite(self, name: str) -> Rewritten:
        """The graph of a variant, before lowering."""
        if name == "sparse":
            return rewrite_sparse(self.gm, self.plans, self.groups, self.config)
        return rewrite_dense(self.gm, self.plans, self.groups, self.config, self.observes)

    def _variant(self, name: str, state: dict[str, Any], args: Sequence[Any] | None) -> Variant:
        cache: AdoptedCache | None = state.get("cache")
        batches = tuple(r.cos.shape[0] for r in cache.rows) if cache is not None else ()
        key = (name, batches)
        if key in self.variants:
            return self.variants[key]
        if args is None and self.cached:
            return self._ahead(name)
        rewritten = self.rewrite(name)
        extra = [self._state(e, cache, args or []) for e in rewritten.inputs]
        self.variants[key] = self._lower(rewritten, extra)
        return self.variants[key]

    def _ahead(self, name: str) -> Variant:
        """Compile the dense variant of a dynamic graph while Dynamo traces, with the position batch of the example."""
        rewritten = self.rewrite(name)
        hints = [_hint(n.meta.get("val")) for n in self.placeholders]
        rows = {}
        for group in self.groups:
            site = self.plans[group.sites[0]].site
            assert site.key_cache is not None
            batch = self._position_batch(group, hints)
            device = site.output.meta["val"].device
            rows[group.index] = Rows.allocate(site, batch, site.key_cache.capacity, self.config, device)
        extra = [
            getattr(rows[e.owner], e.field) if e.kind == "rows" else self._state(e, None, hints)
            for e in rewritten.inputs
        ]
        variant = self._lower(rewritten, extra)
        variant.guards = []  # they reached Dynamo
        self.variants[(name, tuple(r.cos.shape[0] for r in rows.values()))] = variant
        return variant

    def _lower(self, rewritten: Rewritten, extra: Sequence[Tensor], config: SalsConfig | None = None) -> Variant:
        inputs: list[Any] = [n.meta["val"] for n in self.placeholders]
        environment = getattr(self.fake_mode, "shape_env", None)
        known = len(environment.guards) if environment is not None else 0
        with compile_context(self.fake_mode):
            if self.fake_mode is not None:
                inputs += [self.fake_mode.from_tensor(t, static_shapes=True) for t in extra]
            else:
                inputs += list(extra)
            static = [*sorted(self.static), *range(len(self.placeholders), len(inputs))]
            call = lower(rewritten.gm, inputs, config or self.config, self.mode, static)
        guards = [g.expr for g in environment.guards[known:]] if environment is not None else []
        return Variant(rewritten, call, guards)


def _marked_static(value: Any) -> bool:
    """Whether ``torch._dynamo.mark_static_address`` was called on the input."""
    return getattr(value, "_dynamo_static_input_type", None) is not None


class _Sized:
    """Stands for a tensor input where only its shape is asked."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)


def _hint(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if isinstance(value, Tensor):
        return _Sized([s if isinstance(s, int) else s.node.hint for s in value.shape])
    return value
