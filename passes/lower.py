"""A rewritten graph to something that runs: Inductor, plain FX (``eager``), or MLIR.

On a GPU ``sals`` operators stay opaque and dispatch to Triton; on CPU they become kernels that Inductor compiles once
for all layers (``kernels/inductor.py``), or, under symbolic shapes, their reference meaning, compiled with the rest.
The anchored attention decomposes to PyTorch's own for the device. Decomposing happens here, after matching: Inductor
refuses a graph decomposed with another table than its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from ..config import SalsConfig
from ..kernels import inductor, ops


def lower(
    gm: GraphModule, inputs: Sequence[Any], config: SalsConfig, mode: str | None, static: Sequence[int]
) -> inductor.Callee:
    """Compile ``gm`` for ``inputs`` (fake tensors and symbolic integers, in placeholder order).

    Returns a function of the list of real inputs. ``static`` lists inputs whose storage never moves (parameters,
    state), for CUDA graphs.
    """
    if config.lowering == "eager":
        return boxed(gm)
    if config.lowering == "mlir":
        from .lower_mlir import lower_mlir

        return lower_mlir(gm, inputs)
    return _inductor(gm, inputs, config, mode, static)


def boxed(gm: GraphModule) -> inductor.Callee:
    """A graph run node by node, called as compiled ones are: with the list of its inputs."""

    def call(args: list[Any]) -> Any:
        return gm(*args)

    return call


def decompose(gm: GraphModule, inputs: Sequence[Any], table: dict[Any, Any]) -> GraphModule:
    """Retrace ``gm`` through a decomposition table, and give ``sals`` operators what runs them on the device."""
    table = dict(table)
    if all(i.device.type == "cpu" for i in inputs if isinstance(i, Tensor)):
        table |= {ops.operator(name): inductor.shared(name) for name in ops.SCHEMAS}
    anchored = "scaled_dot_product_attention"
    table[ops.operator(anchored)] = ops.meaning(anchored)
    # Constants made while retracing (arange, full) must be as fake as the inputs are.
    fake = torch._guards.detect_fake_mode(list(inputs)) or contextlib.nullcontext()
    with enable_python_dispatcher(), fake:
        traced = make_fx(gm, decomposition_table=table)(*inputs)
    fuse_decode(traced)
    return traced


def fuse_decode(gm: GraphModule) -> None:
    """``encode``, ``score_select`` and ``attend`` of one site as ``sals::decode``, whose kernels run side by side.

    Where scores are those of the query that is attended, and the tokens selected are used nowhere else.
    """
    encode, score_select, attend = (ops.operator(n) for n in ("encode", "score_select", "attend"))
    encodes = {n.args[0]: n for n in gm.graph.find_nodes(op="call_function", target=encode)}
    for node in gm.graph.find_nodes(op="call_function", target=attend):
        _, chosen, codes, *_ = node.args
        stored = encodes.get(codes)
        if stored is None or chosen.target is not score_select or len(chosen.users) > 1 or not stored < chosen:
            continue
        parts = [_arguments(n) for n in (stored, chosen, node)]
        together = parts[0] | parts[1] | parts[2]
        # What two of them take must be the same, the query too.
        if any(part[name] != together[name] for part in parts for name in part):
            continue
        names = [a.name for a in ops.operator("decode")._schema.arguments]
        with gm.graph.inserting_before(node):
            fused = gm.graph.call_function(ops.operator("decode"), tuple(together[n] for n in names))
        # Inductor keeps the strides that an operator's inputs were traced with, and reads them here.
        values = map_arg(fused.args, lambda n: n.meta.get("val"))
        fused.meta = dict(node.meta) | {"eager_input_vals": (values, {})}
        node.replace_all_uses_with(fused)
        for old in (node, chosen, stored):
            gm.graph.erase_node(old)
    gm.recompile()


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """An operator node's arguments by name, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: value for a, value in zip(schema, node.args, strict=False)} | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def _inductor(
    gm: GraphModule, inputs: Sequence[Any], config: SalsConfig, mode: str | None, static: Sequence[int]
) -> inductor.Callee:
    import torch._inductor
    import torch._inductor.config as inductor_config
    from torch._inductor.decomposition import select_decomp_table

    patches = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    patches |= dict(config.inductor)
    if config.cudagraphs:
        patches["triton.cudagraphs"] = True
    with inductor_config.patch(patches):
        return inductor.compile_graph(decompose(gm, inputs, select_decomp_table()), inputs, static)
