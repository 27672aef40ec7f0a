"""``torch.compile(model, backend="sals")``: a Dynamo graph in, a callable out. This file reads as the table of passes.

anchor (Dynamo graph) -> trace (AOT, functional ATen) -> canonicalize -> match -> verify -> plan -> rewrite and lower
(``runtime.py``, once per variant, when first needed).
"""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import virtual
from .config import OptionError, SalsConfig
from .kernels import dispatch
from .passes.anchor import anchor, anchoring, pin_capacities
from .passes.canonicalize import canonicalize
from .passes.ir import Declined
from .passes.low_rank_query import low_rank_query
from .passes.match.attention import match_graph
from .passes.plan import plan
from .passes.rewrite import row_groups
from .passes.verify import verify
from .report import GraphReport, record
from .runtime import CompiledGraph, Registry, query_factors

log = logging.getLogger("sals_compile")

#: operators with Triton launchers, registered by importing the module
TRITON_OPERATORS = tuple(dispatch.TRITON)

_registries: dict[str, Registry] = {}
_training_noticed = False


class DeclinedError(RuntimeError):
    """Raised under ``on_decline="error"``: lists every declined site with its reason."""


def registry_for(config: SalsConfig) -> Registry:
    """State is shared by all graphs compiled with the same options (prefill and decode of one model)."""
    ignored = ("lowering", "inductor", "cudagraphs", "on_decline")
    facts = {k: v for k, v in vars(config).items() if k not in ignored}
    key = repr(sorted((k, id(v) if k == "calibration" and not isinstance(v, str) else v) for k, v in facts.items()))
    return _registries.setdefault(key, Registry())


def sals(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that ``torch.compile`` calls with each graph that Dynamo traced.

    ``options`` are those of :class:`sals_compile.SalsConfig`; ``mode`` keeps torch.compile's meaning (Inductor's
    modes). Raises :class:`sals_compile.OptionError` for a bad option and, under ``on_decline="error"``,
    :class:`DeclinedError`.
    """
    config = load_calibration(SalsConfig.from_options(options))
    if torch.is_grad_enabled() and any(isinstance(i, Tensor) and i.requires_grad for i in example_inputs):
        return _dense_for_training(gm, example_inputs, config, mode)
    anchor(gm)
    pin_capacities(gm)
    return compile_anchored(gm, example_inputs, config, mode)


def load_calibration(config: SalsConfig) -> SalsConfig:
    """Replace a calibration's path by the calibration, and ``budget="auto"`` by the budgets that it gives each site.

    ``budget`` itself becomes the smallest of them: a cache with no more tokens stays dense.
    """
    if isinstance(config.calibration, str):
        from .calibrate import Calibration

        config = dataclasses.replace(config, calibration=Calibration.load(config.calibration))
    if config.budget != "auto":
        return config
    least = config.sinks + config.recents + 1
    budgets = {n: max(least, config.calibration.budget(n, config.auto_mass)) for n in config.calibration.sites}
    budgets |= config.budget_by_site
    return dataclasses.replace(config, budget=min(budgets.values()), budget_by_site=budgets)


def compile_anchored(
    gm: GraphModule, example_inputs: Sequence[Any], config: SalsConfig, mode: str | None
) -> Callable[..., Any]:
    """Trace and compile an anchored Dynamo graph for inference."""
    from torch._functorch.aot_autograd import aot_module_simplified

    built: list[CompiledGraph] = []
    wrapped = any(is_traceable_wrapper_subclass(i) for i in example_inputs)

    def inference_compiler(traced: GraphModule, fakes: Sequence[Any]) -> Callable[[list[Any]], Any]:
        compiled = compile_traced(traced, plain_inputs(example_inputs), config, mode)
        built.append(compiled)
        return compiled

    with torch.no_grad(), anchoring():
        run = aot_module_simplified(
            gm,
            list(example_inputs),
            fw_compiler=inference_compiler,  # type: ignore[arg-type]
            inference_compiler=inference_compiler,  # type: ignore[arg-type]
            keep_inference_input_mutations=True,
        )
    if not built:
        return run
    compiled = built[0]

    def call(*args: Any) -> Any:
        compiled.inspect(plain_inputs(args) if wrapped else args)
        outputs = run(*args)
        compiled.settle()
        return outputs

    return call


def plain_inputs(inputs: Iterable[Any]) -> list[Any]:
    """Inputs as the traced graph takes them: a tensor that wraps others (a ``DTensor``, whose part of the heads is what
    this process computes with) by what it wraps."""
    found: list[Any] = []
    for value in inputs:
        if is_traceable_wrapper_subclass(value):
            found += plain_inputs(getattr(value, name) for name in value.__tensor_flatten__()[0])
        else:
            found.append(value)
    return found


def compile_traced(
    traced: GraphModule, example_inputs: Sequence[Any], config: SalsConfig, mode: str | None
) -> CompiledGraph:
    """The passes, on a functional ATen graph whose inputs are ``example_inputs`` in order.

    Raises :class:`DeclinedError` for a declined site under ``on_decline="error"``.
    """
    timings: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        timings[name] = time.perf_counter() - start
        return result

    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    aligned = len(placeholders) == len(example_inputs)
    example = dict(zip(placeholders, example_inputs, strict=True)) if aligned else {}
    timed("canonicalize", lambda: canonicalize(traced))
    matched = timed("match", lambda: match_graph(traced))
    errors, failed = timed("verify", lambda: verify(matched.sites, example))
    declined = [*matched.declined, *failed]
    refused = {d.name for d in failed}
    sites = [s for s in matched.sites if s.name not in refused]
    if not aligned:
        declined += [
            Declined(s.name, "inputs", "graph inputs alias each other, so buffers cannot be told apart") for s in sites
        ]
        sites = []
    if declined and config.on_decline == "error":
        lines = "\n".join(f"  {d.name}: {d.reason}" for d in declined)
        raise DeclinedError(f"on_decline='error' and {len(declined)} attention sites were declined:\n{lines}")
    plans = timed("plan", lambda: plan(sites, config, errors))
    unclaimed = virtual.unclaimed(traced, plans)
    if unclaimed:
        raise DeclinedError(virtual.unclaimed_message(unclaimed, declined))
    registry = registry_for(config)
    if config.query_rank is not None:
        rank, factors_of = config.query_rank, partial(query_factors, registry, config)
        timed("low_rank_query", lambda: low_rank_query(plans, rank, example, factors_of))
        if plans and not any(p.low_rank_query for p in plans):
            log.warning("option query_rank=%r has no effect: %s", config.query_rank, plans[0].reason)
    compiled: CompiledGraph
    if any(p.site.virtual for p in plans):
        compiled = virtual.VirtualGraph(traced, plans, config, registry, example, mode)
    else:
        compiled = CompiledGraph(traced, plans, row_groups(plans), config, registry, example, mode)
    record(GraphReport(compiled, compiled.plans, declined, config, timings))
    return compiled


def _dense_for_training(
    gm: GraphModule, example_inputs: Sequence[Any], config: SalsConfig, mode: str | None
) -> Callable[..., Any]:
    """Under autograd the graph stays dense, compiled as plain torch.compile would; said once."""
    global _training_noticed
    if not _training_noticed:
        _training_noticed = True
        warnings.warn(
            "backend='sals' is for inference: gradients are required here, so attention stays dense. Call the model "
            "under torch.no_grad() or torch.inference_mode().",
            stacklevel=2,
        )
    if config.lowering != "inductor":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(gm, list(example_inputs))
    import torch._inductor
    from torch._inductor.compile_fx import compile_fx

    patches = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    patches |= dict(config.inductor)
    return compile_fx(gm, list(example_inputs), config_patches=patches)  # type: ignore[return-value]


__all__ = ["DeclinedError", "OptionError", "sals"]
