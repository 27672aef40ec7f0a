"""Which sites become what, and why: from the configuration, the cache's capacity and the site's own shape."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import SalsConfig
from .graph import shape_of
from .ir import AttentionSite, SitePlan


def plan(sites: Sequence[AttentionSite], config: SalsConfig, errors: dict[str, float]) -> list[SitePlan]:
    """One :class:`SitePlan` per verified site. Raises ``OptionError`` for a rank over the site's joint key width."""
    plans = []
    for index, site in enumerate(sites):
        rank, score_rank = config.resolve_rank(site.joint_width)
        action, reason = _decide(site, index, len(sites), config)
        plans.append(SitePlan(site, action, reason, rank, score_rank, errors.get(site.name)))
    return plans


def _decide(site: AttentionSite, index: int, count: int, config: SalsConfig) -> tuple[str, str]:
    if config.attention == "dense":
        return "dense", "option attention='dense'"
    for skip in config.skip_layers:
        if skip in (index, index - count) if isinstance(skip, int) else skip in site.name:
            return "dense", f"option skip_layers={skip!r}"
    if site.cached:
        return _decide_cached(site, config)
    return _decide_stateless(site, config)


def _decide_cached(site: AttentionSite, config: SalsConfig) -> tuple[str, str]:
    assert site.key_cache is not None
    capacity = site.key_cache.capacity
    if site.value_dim != site.head_dim:
        return "dense", f"cached values of head dim {site.value_dim} beside keys of {site.head_dim} are not supported"
    if config.attention == "exact":
        return "exact", "every token, full rank"
    if capacity <= config.budget:
        return "dense", f"cache capacity {capacity} does not exceed the budget of {config.budget} tokens per query"
    if config.value_bits == 4 and site.head_dim % 2:
        return "dense", f"4-bit values need an even head dim, not {site.head_dim}; set value_bits=8"
    return config.attention, f"{config.budget} of {capacity} cached tokens attended per query"


def near_tokens(config: SalsConfig) -> int:
    """Keys either side of a query block that are always attended: ``recents``, or what the budget leaves room for."""
    return min(config.recents, (config.budget - config.sinks - config.query_block) // 2)


def _decide_stateless(site: AttentionSite, config: SalsConfig) -> tuple[str, str]:
    if config.attention == "exact":
        return "exact", "every token, full rank"
    if config.attention == "reconstruct":
        return "dense", "no KV cache in this graph, so there is nothing to compress and rebuild"
    length = shape_of(site.query.node)[_token_dim(site)] if _token_dim(site) is not None else 1
    keys = shape_of(site.key_pre.node)[_token_dim(site, key=True)] if _token_dim(site, key=True) is not None else 1
    if isinstance(keys, int) and keys <= config.budget:
        return "dense", f"{keys} keys do not exceed the budget of {config.budget} tokens per query"
    if isinstance(length, int) and length <= config.decode_tokens:
        return "dense", "few queries and no KV cache: selection would cost what it saves"
    if near_tokens(config) < 1:
        return "dense", (
            f"budget {config.budget} leaves no room beside {config.sinks} sinks and blocks of {config.query_block} "
            f"queries; raise budget or lower query_block"
        )
    return "sals", f"{config.budget} keys attended per block of {config.query_block} queries"


def _token_dim(site: AttentionSite, key: bool = False) -> int | None:
    """The dim of the operand's node that is (part of) its token axis."""
    layout = site.key_pre.layout if key else site.query.layout
    if not layout.order[1]:
        return None
    first, number = layout.order[1][0], 0
    for dim, factors in enumerate(layout.parts):
        number += len(factors)
        if first < number:
            return dim
    return None
