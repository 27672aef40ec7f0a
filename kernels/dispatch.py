"""Which Triton launcher runs each ``sals`` operator on CUDA and HIP tensors.

Importing this module registers the table on PyTorch's CUDA dispatch key (which ROCm uses too). Triton and the kernels
themselves are imported by the first call with such a tensor, so nothing here needs Triton or a GPU. An operator that
is not in the table runs its reference meaning in PyTorch, as all do without Triton.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from torch.library import Library

from . import ops

#: operator -> "module of this package:function"; the function takes the operator's arguments.
TRITON: dict[str, str] = {
    "record_rows": "encode:record_rows",
    "encode": "encode:encode",
    "score": "score:score",
    "select": "select:select",
    "score_select": "select:score_select",
    "attend": "attend:attend",
    "decode": "decode:decode",
    "reconstruct": "prefill:reconstruct",
    "materialize": "prefill:materialize",
    "dense_attention": "dense:dense_attention",
    "block_select": "block_sparse:block_select",
    "block_attend": "block_sparse:block_attend",
}


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton can be imported; without it every operator runs its reference meaning."""
    return importlib.util.find_spec("triton") is not None


@cache
def launcher(name: str) -> Callable[..., Any]:
    """The function that launches operator ``name``'s kernels. Imports Triton."""
    module, _, function = TRITON[name].partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), function)


def _implementation(name: str) -> Callable[..., Any]:
    meaning = ops.meaning(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        return (launcher(name) if has_triton() else meaning)(*args, **kwargs)

    run.__name__ = run.__qualname__ = f"triton_{name}"
    return run


_library = Library("sals", "IMPL")
for _name in TRITON:
    _library.impl(_name, _implementation(_name), "CUDA")
