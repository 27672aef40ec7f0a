"""A model that is sharded over two processes: each adopts its own heads, and together they equal the whole."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from test_exact import compiled
from tiny import llama, rollout

import sals_compile

CUTS, CAPACITY = [40, 41, 42], 64
SMALL = {"budget": 24, "sinks": 2, "recents": 8}


def cache_of(kind: str, model):
    if kind == "sals":
        from sals_compile.integrations.transformers import SalsCache

        return SalsCache(model.config, CAPACITY)
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=CAPACITY)


def shard(model):
    """By PyTorch's styles, whose parameters are ``DTensor``.

    Not by transformers' ``tp_plan="auto"``: it shards the embedding as well, which Dynamo cannot trace over one token
    whatever the backend (torch 2.13, transformers 5.24).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    styles = {name: ColwiseParallel() for name in columns}
    styles |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, styles)


def work(kind: str) -> None:
    """One of the two processes; which, the environment says."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = llama(layers=2)
    tokens = torch.randint(0, 64, (2, CUTS[-1]))
    with torch.no_grad():
        expected = rollout(model.forward, tokens, CUTS, cache_of("static", model))
        shard(model)
        found = rollout(compiled(model.forward, attention="exact", **SMALL), tokens, CUTS, cache_of(kind, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for report in sals_compile.compiled_reports():
        assert [(s.status, s.heads) for s in report.sites] == [("exact", "2/1x16")] * 2, str(report)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["static", "sals"])
def test_two_processes_equal_one(kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, kind]
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, env=os.environ | both | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]  # fmt: skip
    errors = [p.communicate(timeout=300)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], "\n".join(errors)[-6000:]


if __name__ == "__main__":
    work(sys.argv[1])
