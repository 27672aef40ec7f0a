"""Which sites become what, and why: from the configuration, the cache's capacity and the site's own shape."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import SalsConfig
from .graph import shape_of
from .ir import AttentionSite, SitePlan


def plan(sites: Sequence[AttentionSite], config: SalsConfig, errors: dict[str, float]) -> list[SitePlan]:
    """One :class:`SitePlan` per verified site.

    Raises ``OptionError`` for a rank over the site's joint key width, ``CalibrationError`` where an option is
    ``"auto"`` and the calibration does not know the site.
    """
    plans = []
    for index, site in enumerate(sites):
        rank, score_rank = config.resolve_rank(site.joint_width)
        budget = config.budget_by_site.get(site.name, config.budget)
        action, reason = _decide(site, index, len(sites), config, budget)
        error = errors.get(site.name)
        plans.append(SitePlan(site, action, reason, rank, score_rank, budget, verified_error=error))
    return plans


def _decide(site: AttentionSite, index: int, count: int, config: SalsConfig, budget: int) -> tuple[str, str]:
    if config.attention == "dense":
        return "dense", "option attention='dense'"
    for skip in config.skip_layers:
        if skip == "auto":
            if reason := auto_skip(site.name, index, count, config, budget):
                return "dense", f"option skip_layers='auto': {reason}"
        elif skip in (index, index - count) if isinstance(skip, int) else skip in site.name:
            return "dense", f"option skip_layers={skip!r}"
    action, reason = _decide_cached(site, config, budget) if site.cached else _decide_stateless(site, config, budget)
    if action == "sals" and site.name in config.budget_by_site and config.calibration is not None:
        kept = config.calibration.retained(site.name, budget)
        reason += f"; the best {budget} kept {kept:.3f} of the calibration's attention"
    if action != "dense" and site.note:
        reason += f"; {site.note}"
    return action, reason


def auto_skip(name: str, index: int, count: int, config: SalsConfig, budget: int) -> str:
    """Why ``skip_layers="auto"`` leaves site ``name``, the ``index``-th of ``count``, dense; or the empty string."""
    if config.calibration is None:
        first_or_last = index < 2 or index == count - 1
        return "without a calibration, the first two and the last" if first_or_last else ""
    kept = config.calibration.retained(name, budget)
    if kept >= config.auto_mass:
        return ""
    return (
        f"its best {budget} tokens kept {kept:.3f} of the attention on the calibration's text, less than "
        f"auto_mass={config.auto_mass}"
    )


def _decide_cached(site: AttentionSite, config: SalsConfig, budget: int) -> tuple[str, str]:
    assert site.key_cache is not None
    capacity = site.key_cache.capacity
    if site.value_dim != site.head_dim:
        return "dense", f"cached values of head dim {site.value_dim} beside keys of {site.head_dim} are not supported"
    if config.attention == "exact":
        return "exact", "every token, full rank"
    if capacity <= budget:
        return "dense", f"cache capacity {capacity} does not exceed the budget of {budget} tokens per query"
    if config.value_bits < 8 and site.head_dim % (8 // config.value_bits):
        need = f"a head dim divisible by {8 // config.value_bits}"
        return "dense", f"{config.value_bits}-bit values need {need}, not {site.head_dim}; set value_bits=8"
    return config.attention, f"{budget} of {capacity} cached tokens attended per query"


def near_tokens(config: SalsConfig, budget: int) -> int:
    """Keys either side of a query block that are always attended: ``recents``, or what the budget leaves room for."""
    return min(config.recents, (budget - config.sinks - config.query_block) // 2)


def _decide_stateless(site: AttentionSite, config: SalsConfig, budget: int) -> tuple[str, str]:
    if config.attention == "exact":
        return "exact", "every token, full rank"
    if config.attention == "reconstruct":
        return "dense", "no KV cache in this graph, so there is nothing to compress and rebuild"
    length = shape_of(site.query.node)[_token_dim(site)] if _token_dim(site) is not None else 1
    keys = shape_of(site.key_pre.node)[_token_dim(site, key=True)] if _token_dim(site, key=True) is not None else 1
    if isinstance(keys, int) and keys <= budget:
        return "dense", f"{keys} keys do not exceed the budget of {budget} tokens per query"
    if isinstance(length, int) and length <= config.decode_tokens:
        return "dense", "few queries and no KV cache: selection would cost what it saves"
    if near_tokens(config, budget) < 1:
        return "dense", (
            f"budget {budget} leaves no room beside {config.sinks} sinks and blocks of {config.query_block} "
            f"queries; raise budget or lower query_block"
        )
    return "sals", f"{budget} keys attended per block of {config.query_block} queries"


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
