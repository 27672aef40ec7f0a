"""A rewritten graph to something that runs: Inductor, plain FX (``eager``), or MLIR.

``sals`` operators are decomposed to their reference meaning where the target has no kernel for them (CPU), so that
Inductor compiles and fuses them with the rest; on a GPU they stay opaque and dispatch to Triton. The anchored attention
decomposes to PyTorch's own for the device. Decomposing happens here, after matching: Inductor refuses a graph
decomposed with another table than its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ..config import SalsConfig
from ..kernels import ops

Callee = Callable[[list[Any]], Any]


def lower(
    gm: GraphModule, inputs: Sequence[Any], config: SalsConfig, mode: str | None, static: Sequence[int]
) -> Callee:
    """Compile ``gm`` for ``inputs`` (fake tensors and symbolic integers, in placeholder order).

    Returns a function of the list of real inputs. ``static`` lists inputs whose storage never moves (parameters,
    state), for CUDA graphs.
    """
    if config.lowering == "eager":
        return _boxed(gm)
    if config.lowering == "mlir":
        from .lower_mlir import lower_mlir

        return lower_mlir(gm, inputs)
    return _inductor(gm, inputs, config, mode, static)


def _boxed(gm: GraphModule) -> Callee:
    def call(args: list[Any]) -> Any:
        return gm(*args)

    return call


def on_cpu(inputs: Sequence[Any]) -> bool:
    return all(i.device.type == "cpu" for i in inputs if isinstance(i, Tensor))


def decompose(gm: GraphModule, inputs: Sequence[Any], table: dict[Any, Any], everything: bool = False) -> GraphModule:
    """Retrace ``gm`` through a decomposition table; ``sals`` operators without a kernel on the device become their
    meaning."""
    table = dict(table)
    meanings = ops.decompositions()
    anchored = ops.operator("scaled_dot_product_attention")
    table |= meanings if everything or on_cpu(inputs) else {anchored: meanings[anchored]}
    # Constants made while retracing (arange, full) must be as fake as the inputs are.
    fake = torch._guards.detect_fake_mode(list(inputs)) or contextlib.nullcontext()
    with enable_python_dispatcher(), fake:
        return make_fx(gm, decomposition_table=table)(*inputs)


def _inductor(
    gm: GraphModule, inputs: Sequence[Any], config: SalsConfig, mode: str | None, static: Sequence[int]
) -> Callee:
    import torch._inductor
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.utils import BoxedBool

    patches = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    patches |= dict(config.inductor)
    if config.cudagraphs:
        patches["triton.cudagraphs"] = True
    with inductor_config.patch(patches):
        traced = decompose(gm, inputs, select_decomp_table())
        output = next(n for n in reversed(traced.graph.nodes) if n.op == "output")
        flat = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
        if not isinstance(output.args[0], (tuple, list)):
            output.args = ((output.args[0],),)
        output.meta["user_visible_output_idxs"] = [i for i, o in enumerate(flat) if isinstance(o, torch.fx.Node)]
        compiled = compile_fx_inner(
            traced,
            list(inputs),
            static_input_idxs=list(static),
            cudagraphs=BoxedBool(bool(inductor_config.triton.cudagraphs)),
            boxed_forward_device_index=BoxedDeviceIndex(None),
            is_inference=True,
        )
    return compiled  # takes a list of inputs


@contextlib.contextmanager
def compile_context(fake_mode: Any):
    """What Inductor expects around it when a variant is compiled later than the frame that Dynamo traced."""
    from torch._inductor.virtualized import V

    with torch.no_grad(), V.set_fake_mode(fake_mode), torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield
