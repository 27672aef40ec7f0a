"""A rewritten graph to MLIR (torch-mlir), and through IREE to something that runs on a CPU.

``sals`` operators are decomposed to their reference meaning, the graph is made functional (what it writes to its inputs
become extra results, which the caller copies back), imported by torch-mlir as the *torch* dialect and compiled by IREE
(``input_type="torch"``). Where a reference function uses an operator that MLIR does not lower, this file holds an
equivalent formulation; the meaning stays that of ``kernels/reference.py``.

Packages: PyPI ``torch-mlir``, ``iree-base-compiler``, ``iree-base-runtime`` (the extra ``mlir``), imported when first
needed.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels import ops, reference
from .ir import module_path

aten = torch.ops.aten

REMEDY = "pip install 'sals-compile[mlir]' (PyPI: torch-mlir, iree-base-compiler, iree-base-runtime)"


class MlirError(RuntimeError):
    """An operator that MLIR does not lower, by name and by the attention site or module that it came from."""


@dataclass
class Functional:
    """A functional graph: ``gm`` takes the tensors ``inputs`` (positions among the original inputs).

    Its results are the original ones that are tensors (``results[i]`` is the position of result ``i`` among them; other
    results are in ``constants``) followed by the new contents of the inputs ``written``.
    """

    gm: GraphModule
    inputs: list[int]
    results: list[int]
    constants: dict[int, Any]
    written: list[int]
    single: bool


# ---- equivalent formulations -----------------------------------------------------------------------------------------


def select(scores: Tensor, k: int) -> Tensor:
    """``reference.select`` without integer bit patterns: the k-th score is the threshold, and ties at it go to the
    lower index."""
    total = scores.shape[-1]
    taken = min(k, total)
    scores = torch.where(torch.isnan(scores), -torch.inf, scores)
    # torch-mlir's top-k wants finite floats; infinities are ordered by values outside the range of any score.
    scores = scores.clamp(-3.0e38, 3.0e38)
    threshold = torch.topk(scores, taken, dim=-1).values[..., -1:]
    above, equal = scores > threshold, scores == threshold
    room = taken - above.to(torch.int32).sum(-1, keepdim=True)
    rank = torch.cumsum(equal.to(torch.int32), -1)
    chosen = (above | (equal & (rank <= room))) & (scores > -3.0e38)
    # Positions as floats are exact up to 2**24 slots; the largest negated ones are the lowest indices, in order.
    position = torch.arange(total, device=scores.device).to(torch.float32)
    ascending = -torch.topk(torch.where(chosen, -position, -float(total)), taken, dim=-1).values
    index = torch.where(ascending >= float(total), -1.0, ascending).to(torch.int32)
    return index if k <= total else torch.nn.functional.pad(index, (0, k - total), value=-1)


@contextlib.contextmanager
def _formulations() -> Iterator[None]:
    """Reference functions that call each other find the formulations above while a graph is decomposed."""
    original = reference.select
    reference.select = select
    try:
        yield
    finally:
        reference.select = original


# ---- decomposed and functional ---------------------------------------------------------------------------------------


class _Origins(Interpreter):
    """Runs a graph under ``make_fx`` and notes on each traced node which attention site or module it came from."""

    def run_node(self, n: Node) -> Any:
        mode = get_proxy_mode()
        graph = mode.tracer.graph if mode is not None else None
        known = len(graph.nodes) if graph is not None else 0
        result = super().run_node(n)
        if graph is not None:
            origin = n.meta.get("origin") or (module_path(n) if "nn_module_stack" in n.meta else _operator(n))
            for node, _ in zip(reversed(graph.nodes), range(len(graph.nodes) - known), strict=False):
                node.meta.setdefault("origin", origin)
        return result


def _operator(node: Node) -> str:
    return str(node.target).removesuffix(".default")


def functional(gm: GraphModule, inputs: Sequence[Any]) -> Functional:
    """Decompose ``sals`` operators and turn writes to inputs into results. ``inputs``: tensors (fake or real) and
    integers; static."""
    from torch_mlir.fx import get_decomposition_table

    table = dict(ops.decompositions()) | {ops.operator("select"): select}
    with _formulations(), torch.no_grad(), _disable_current_modes():
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        args = [_fake(fake, a) for a in inputs]
        with enable_python_dispatcher(), fake:
            plain = make_fx(_Origins(gm).run, decomposition_table=table)(*args)
            wrapped = torch.func.functionalize(_Origins(plain).run, remove="mutations")
            flat = make_fx(wrapped, decomposition_table=get_decomposition_table())(*args)
    return _split(flat)


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return int(value.node.hint) if isinstance(value, torch.SymInt) else value
    shape = [s if isinstance(s, int) else int(s.node.hint) for s in value.shape]
    with mode:
        return torch.empty(shape, dtype=value.dtype, device="cpu")


def _split(gm: GraphModule) -> Functional:
    """Trailing ``copy_`` into inputs become results; inputs and results that are no tensors, or unused, go."""
    graph = gm.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    position = {n: i for i, n in enumerate(placeholders)}
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    returned = output.args[0]
    single = not isinstance(returned, (tuple, list))
    returned = [returned] if single else list(returned)
    written: dict[int, Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in position:
            source = node.args[1]
            written[position[node.args[0]]] = source
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    returned = list(output.args[0]) if not single else [output.args[0]]
    results = [i for i, r in enumerate(returned) if isinstance(r, Node) and isinstance(r.meta.get("val"), Tensor)]
    constants = {i: r for i, r in enumerate(returned) if i not in results}
    output.args = (tuple([returned[i] for i in results] + list(written.values())),)
    _tidy(graph)
    graph.eliminate_dead_code()
    inputs = []
    for node, index in position.items():
        if node.users:
            inputs.append(index)
        else:
            graph.erase_node(node)
    gm.recompile()
    return Functional(gm, inputs, results, constants, list(written), single)


def _tidy(graph: torch.fx.Graph) -> None:
    """Spellings that the importer does not know, in ones that it does."""
    for node in list(graph.nodes):
        if node.target in (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target in (aten.__lshift__.Scalar, aten.__rshift__.Scalar):
            _shift(node)
        elif isinstance(node.target, torch._ops.OpOverload):
            node.target = _SCALAR.get(node.target, node.target)
            for index, (argument, value) in enumerate(zip(node.target._schema.arguments, node.args, strict=False)):
                # A number in the place of a tensor (`slots // 128`) is a 0-d tensor of the other operand's type.
                if isinstance(argument.type, torch.TensorType) and isinstance(value, (int, float)):
                    like = node.args[0].meta["val"] if isinstance(node.args[0], Node) else node.meta["val"]
                    dtype = like.dtype if isinstance(value, int) or like.is_floating_point() else torch.float32
                    with graph.inserting_before(node):
                        scalar = graph.call_function(aten.full.default, ([], value), {"dtype": dtype})
                        scalar.meta = {"val": like.new_empty((), dtype=dtype), "origin": node.meta.get("origin")}
                    node.update_arg(index, scalar)


_SCALAR = {
    aten.bitwise_xor.Scalar: aten.bitwise_xor.Tensor,
    aten.bitwise_or.Scalar: aten.bitwise_or.Tensor,
}


def _shift(node: Node) -> None:
    """A shift by a literal as int64 arithmetic: a product, or a division rounded down."""
    value = node.meta["val"]
    left = node.target is aten.__lshift__.Scalar

    def emit(target: Any, *args: Any, **kwargs: Any) -> Node:
        made = node.graph.call_function(target, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        made.meta = {"val": target(*values[0], **values[1]), "origin": node.meta.get("origin")}
        return made

    with node.graph.inserting_before(node), detect_fake_mode([value]) or contextlib.nullcontext():
        wide = emit(torch.ops.prims.convert_element_type.default, node.args[0], torch.int64)
        factor = emit(aten.full.default, [], 1 << node.args[1], dtype=torch.int64)  # type: ignore[operator]
        moved = (
            emit(aten.mul.Tensor, wide, factor)
            if left
            else emit(aten.div.Tensor_mode, wide, factor, rounding_mode="floor")
        )
        narrow = emit(torch.ops.prims.convert_element_type.default, moved, value.dtype)
    node.replace_all_uses_with(narrow)
    node.graph.erase_node(node)


# ---- MLIR and IREE ---------------------------------------------------------------------------------------------------


def to_mlir(gm: GraphModule, inputs: Sequence[Any], dialect: str = "torch") -> tuple[str, Functional]:
    """MLIR text of ``gm`` for ``inputs``, and how its signature relates to theirs.

    ``dialect``: ``"raw"`` (torch dialect as imported), ``"torch"`` (torch-mlir's backend contract) or ``"linalg"``.
    Raises :class:`MlirError` naming operator and site where something does not lower, ``ImportError`` without
    torch-mlir.
    """
    try:
        from torch_mlir import fx
        from torch_mlir.compiler_utils import TorchMlirCompilerError
    except ImportError as error:
        raise ImportError(f"MLIR export needs torch-mlir: {REMEDY}") from error
    flat = functional(gm, inputs)
    kind = {"raw": "raw", "torch": "torch", "linalg": "linalg-on-tensors"}[dialect]
    with _disable_current_modes():
        try:
            return str(fx.stateless_fx_import(flat.gm, output_type=kind)), flat
        except (TorchMlirCompilerError, NotImplementedError, RuntimeError, ValueError) as error:
            raise _explained(flat.gm, str(error) + _foreign(flat.gm), f"torch-mlir ({dialect})") from error


def _foreign(gm: GraphModule) -> str:
    """Operators that the torch dialect has no name for: torch-mlir prints its diagnostics past Python, so they are
    looked up."""
    from torch_mlir import fx

    with contextlib.suppress(Exception):
        text = str(fx.stateless_fx_import(gm, output_type="raw"))
        return "\n" + "\n".join(
            f"error: no lowering of {n}" for n in set(re.findall(r'torch.operator "([\w.]+)"', text))
        )
    return ""


def _explained(gm: GraphModule, text: str, tool: str) -> MlirError:
    """The diagnostic with the operators it names, and the sites these came from."""
    names = set(re.findall(r"torch\.(aten\.[\w.]+)", text)) | set(re.findall(r"\baten\.[\w.]+", text))
    found: dict[str, set[str]] = {}
    for node in gm.graph.nodes:
        name = str(node.target)
        if any(name == n or name.removesuffix(".default") == n or name.startswith(n + ".") for n in names):
            found.setdefault(name.removesuffix(".default"), set()).add(str(node.meta.get("origin", "the graph")))
    first = next((line for line in text.splitlines() if "error:" in line), text[:200])
    where = "; ".join(f"{op} (from {', '.join(sorted(sites)[:4])})" for op, sites in sorted(found.items()))
    return MlirError(f"{tool} does not lower {where or 'this graph'}: {first.strip()[:400]}")


def _compile(text: str, gm: GraphModule) -> Callable[..., Any]:
    """IREE's ``main`` for torch-dialect ``text``: numpy-like arrays in, device arrays out."""
    try:
        import iree.compiler
        import iree.runtime
        from iree.compiler.tools.binaries import CompilerToolError
    except ImportError as error:
        raise ImportError(f"lowering='mlir' needs IREE: {REMEDY}") from error
    try:
        binary = iree.compiler.compile_str(
            text,
            input_type="torch",
            target_backends=["llvm-cpu"],
            extra_args=["--iree-llvmcpu-target-cpu=host"],
        )
    except CompilerToolError as error:
        raise _explained(gm, str(error), "IREE") from error
    config = iree.runtime.Config("local-task")
    context = iree.runtime.SystemContext(config=config)
    context.add_vm_module(iree.runtime.VmModule.copy_buffer(config.vm_instance, binary))
    main = context.modules.module["main"]

    def call(arrays: Sequence[Any]) -> Any:
        return main(*[iree.runtime.asdevicearray(config.device, a) for a in arrays])

    return call


def lower_mlir(gm: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """A function of the list of real inputs that runs ``gm`` (``sals`` operators and all) through torch-mlir and IREE
    on the CPU.

    Compiles when first called, once per set of input shapes (MLIR takes static shapes). Raises :class:`MlirError` or
    ``ImportError`` then.
    """
    if any(isinstance(i, Tensor) and i.device.type != "cpu" for i in inputs):
        raise MlirError("lowering='mlir' runs on CPU tensors; move the model, or use lowering='inductor'")
    compiled: dict[Any, tuple[Callable[..., Any], Functional]] = {}

    def call(args: list[Any]) -> Any:
        key = tuple((tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args)
        if key not in compiled:
            text, flat = to_mlir(gm, args, "raw")
            compiled[key] = (_compile(text, flat.gm), flat)
        run, flat = compiled[key]
        with torch.no_grad():
            outcome = run([_to_array(args[i]) for i in flat.inputs])
            arrays = outcome if isinstance(outcome, (tuple, list)) else (outcome,)
            shapes = [n.meta["val"] for n in _output(flat.gm)]
            tensors = [_to_tensor(a, s) for a, s in zip(arrays, shapes, strict=True)]
            for index, new in zip(flat.written, tensors[len(flat.results) :], strict=True):
                args[index].copy_(new)
        results = dict(flat.constants) | dict(zip(flat.results, tensors, strict=False))
        ordered = tuple(results[i] for i in sorted(results))
        return ordered[0] if flat.single else ordered

    weakref.finalize(call, compiled.clear)  # also when the process ends: IREE's bindings call what then lives a leak
    return call


def _output(gm: GraphModule) -> Sequence[Node]:
    return next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0]


def _to_array(tensor: Tensor) -> Any:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _to_tensor(array: Any, like: Tensor) -> Tensor:
    import numpy

    host = numpy.array(array.to_host())  # IREE's memory is not ours to keep
    if like.dtype == torch.bfloat16:
        return torch.from_numpy(host.view(numpy.int16)).view(torch.bfloat16).reshape(like.shape)
    return torch.from_numpy(host).to(like.dtype).reshape(like.shape)
