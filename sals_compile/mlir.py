"""MLIR of the rewritten graph: ``export`` gives text, ``torch.compile(..., options={"lowering": "mlir"})`` runs it
through IREE on a CPU.

Needs the extra ``mlir``: PyPI ``torch-mlir``, and to run, ``iree-base-compiler`` and ``iree-base-runtime``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .config import OptionError
from .passes.lower_mlir import MlirError, to_mlir
from .report import explain

DIALECTS = ("torch", "linalg")


def export(
    fn: Callable[..., Any], *args: Any, dialect: str = "torch", options: Mapping[str, Any] | None = None, **kwargs: Any
) -> str:
    """MLIR text of the graph that ``fn(*args, **kwargs)`` becomes: its sparse variant, ``sals`` operators by their
    reference meaning.

    The function ``main`` takes the tensors that the rewritten graph reads, in order (the graph's own inputs, then the
    state tensors of ``GraphReport.state_inputs``), and returns the graph's tensors followed by the new contents of
    every input that the graph writes.

    Args:
        fn, args, kwargs: a call to compile, as for :func:`sals_compile.explain`; shapes are taken as they are (static).
        dialect: ``"torch"`` (torch-mlir's backend contract) or ``"linalg"`` (linalg on tensors).
        options: those of :class:`sals_compile.SalsConfig`.

    Raises:
        OptionError: a bad option or dialect.
        MlirError: an operator that does not lower, named with the site it came from.
        ImportError: torch-mlir is not installed.
        ValueError: nothing was traced.
    """
    if dialect not in DIALECTS:
        raise OptionError(f"option dialect={dialect!r}: allowed are {', '.join(map(repr, DIALECTS))}")
    report = explain(fn, *args, options=options, **kwargs).first
    gm = report.rewritten_with_values().gm
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    return to_mlir(gm, inputs, dialect)[0]


__all__ = ["MlirError", "export"]
