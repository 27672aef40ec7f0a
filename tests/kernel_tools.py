"""Compile a launcher's Triton kernels ahead of time, for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}

#: (backend, architecture, warp size) that every kernel must compile for.
TARGETS = (("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64))


@dataclass
class Launch:
    """One kernel launch as a launcher made it."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass
class Compiled:
    kernel: str
    target: str
    shared: int
    registers: int | None
    spills: int | None


def record(launcher: Callable[[], Any]) -> list[Launch]:
    """The launches that ``launcher`` makes, none of which runs."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {k: kwargs.pop(k) for k in list(kwargs) if k not in self.arg_names}
        launches.append(Launch(self, dict(zip(self.arg_names, args, strict=False)) | kwargs, options))

    with mock.patch.object(JITFunction, "run", run):
        launcher()
    return launches


def compile_for(launch: Launch, backend: str, arch: int | str, warp_size: int) -> Compiled:
    """Compile one launch for a target, specialised as the launch itself would be."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def describe(value: Any, path: tuple[int, ...], constant: bool) -> Any:
        if isinstance(value, tuple) and not constant:
            return tuple(describe(v, (*path, i), False) for i, v in enumerate(value))
        if constant or value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return _TYPES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    arguments = dict(launch.arguments)
    if "PDL" in arguments:
        arguments["PDL"] = backend == "cuda" and int(arch) >= 90
    if "STAGES" in arguments and backend == "hip":
        arguments["STAGES"] = min(arguments["STAGES"], 2)
    for position, parameter in enumerate(launch.kernel.params):
        value = arguments.get(parameter.name, parameter.default)
        signature[parameter.name] = describe(value, (position,), parameter.is_constexpr)
    options = {k: v for k, v in launch.options.items() if k in ("num_warps", "num_stages", "maxnreg")}
    if backend == "hip":
        options["num_stages"] = min(options.get("num_stages", 2), 2)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp_size), options=options)
    registers, spills = _resources(compiled, backend)
    return Compiled(launch.kernel.__name__, f"{backend}:{arch}", compiled.metadata.shared, registers, spills)


def _resources(compiled: Any, backend: str) -> tuple[int | None, int | None]:
    """Registers of a thread and spilled registers or bytes, as the assembler noted them."""
    import re
    import subprocess
    import tempfile

    if backend == "hip":
        text = compiled.asm["amdgcn"]
        found = [re.search(rf"\.{name}:\s*(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count")]
        return tuple(int(f.group(1)) if f else None for f in found)  # type: ignore[return-value]
    import os

    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    if not os.path.exists(tool):
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    found = [re.search(rf"{name}:(\d+)", text) for name in ("REG", "STACK")]
    return tuple(int(f.group(1)) if f else None for f in found)  # type: ignore[return-value]
