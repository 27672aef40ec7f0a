"""The CPU's kernels: each operator's meaning, compiled by Inductor once for a signature and shared by every layer.

``sals_inductor::<name>`` is ``sals::<name>`` with that implementation. Decomposing the operators into the graph instead
would hand Inductor as many copies to compile as the model has layers, of some four hundred nodes each, for little to
fuse across their borders.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import Library, register_fake
from torch.utils import _pytree as pytree

from . import ops

Callee = Callable[[list[Any]], Any]


@contextlib.contextmanager
def compile_context(fake_mode: Any):
    """What Inductor expects around it outside of the frame that Dynamo traced."""
    from torch._inductor.virtualized import V

    with torch.no_grad(), V.set_fake_mode(fake_mode), torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield


def compile_graph(traced: GraphModule, inputs: Sequence[Any], static: Sequence[int] = ()) -> Callee:
    """Inductor on a graph already decomposed by its table; returns a function of the list of inputs.

    ``static`` lists inputs whose storage never moves. Inductor's current configuration applies.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool

    output = next(n for n in reversed(traced.graph.nodes) if n.op == "output")
    flat = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
    output.meta["user_visible_output_idxs"] = [i for i, o in enumerate(flat) if isinstance(o, torch.fx.Node)]
    return compile_fx_inner(
        traced,
        list(inputs),
        static_input_idxs=list(static),
        cudagraphs=BoxedBool(bool(inductor_config.triton.cudagraphs)),
        boxed_forward_device_index=BoxedDeviceIndex(None),
        is_inference=True,
    )


_compiled: dict[Any, Callee] = {}
_lock = threading.Lock()


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.shape, leaf.stride())
    return (type(leaf), leaf)


def _run(name: str, *args: Any, **kwargs: Any) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    key = (name, structure, tuple(map(_signature, leaves)))
    call = _compiled.get(key)
    if call is None:
        with _lock:
            call = _compiled.setdefault(key, _compile(name, leaves, structure))
    outputs = call([x for x in leaves if isinstance(x, Tensor)])
    returned = ops.operator(name)._schema.returns
    return None if not returned else outputs[0] if len(returned) == 1 else tuple(outputs)


def _compile(name: str, leaves: Sequence[Any], structure: Any) -> Callee:
    from torch._inductor.decomposition import select_decomp_table

    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    meaning = ops.meaning(name)

    def program(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for position, tensor in zip(positions, tensors, strict=True):
            filled[position] = tensor
        args, kwargs = pytree.tree_unflatten(filled, structure)
        return meaning(*args, **kwargs)

    with torch.utils._python_dispatch._disable_current_modes():
        fake_mode = torch._subclasses.FakeTensorMode()
        fakes = [fake_mode.from_tensor(leaves[i], static_shapes=True) for i in positions]
        with compile_context(fake_mode):
            with enable_python_dispatcher(), fake_mode:
                traced = make_fx(program, decomposition_table=select_decomp_table())(*fakes)
            return compile_graph(traced, fakes)


_library = Library("sals_inductor", "DEF")
for _name, _schema in ops.SCHEMAS.items():
    _library.define(_name + _schema)
    _library.impl(_name, partial(_run, _name), "CPU")
    register_fake(f"sals_inductor::{_name}", ops.shapes(_name), lib=_library)


def _is_static(values: Any) -> bool:
    """Whether nothing symbolic is among an operator's arguments: shapes as they will be at run time, and integers."""
    return not any(
        isinstance(x, torch.SymInt)
        or (isinstance(x, Tensor) and any(isinstance(s, torch.SymInt) for s in (*x.shape, *x.stride())))
        for x in pytree.tree_leaves(values)
    )


def shared(name: str) -> Callable[..., Any]:
    """What ``sals::name`` decomposes to under Inductor: the shared kernel where shapes are known, else its meaning."""
    kernel, meaning = getattr(torch.ops.sals_inductor, name).default, ops.meaning(name)

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return (kernel if _is_static((args, kwargs)) else meaning)(*args, **kwargs)

    return decomposed
