"""The script for a GPU, on CPU at tiny sizes: its logic and its JSON. No time counts."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from anabranch import AttentionKind, DecodeBatch, LatentCache, MLADims, partial_attention

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device.py"


class EmulatedFlashInfer:
    """FlashInfer 0.7's MLA wrapper as documented, in FP64: CSR tables in, LSE of base 2 out.

    The names of the arguments are those of its source, so far as this project gives them.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor) -> None:
        self.plan_: dict[str, Any] = {}

    def plan(
        self, *, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, num_heads: int,
        head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float,
        q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        self.plan_ = dict(locals())
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"):
            assert self.plan_[name].dtype == torch.int32

    def run(
        self, *, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        p, outs, logs = self.plan_, [], []
        for b, length in enumerate(p["kv_len_arr"].tolist()):
            pages = p["kv_indices"][p["kv_indptr"][b] : p["kv_indptr"][b + 1]].long()
            assert len(pages) == -(-length // p["page_size"])
            latent = ckv_cache[pages].flatten(0, 1)[:length].double()
            rope = kpe_cache[pages].flatten(0, 1)[:length].double()
            rows = slice(p["qo_indptr"][b], p["qo_indptr"][b + 1])
            scores = q_nope[rows].double() @ latent.T + q_pe[rows].double() @ rope.T
            outs.append((scores * p["sm_scale"]).softmax(-1) @ latent)
            logs.append((scores * p["sm_scale"]).logsumexp(-1) / torch.tensor(2.0).log())
        return torch.cat(outs), torch.cat(logs)


def test_flashinfer_is_given_the_same_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    module = ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = EmulatedFlashInfer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    spec = spec_from_file_location("device_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    device = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "device_benchmark", device)
    spec.loader.exec_module(device)

    dims = MLADims(3, 32, 8, 16, 16, 0.1)
    paged = type("Paged", (), {"dims": dims})()
    paged.cache = LatentCache(8, 64, dims, torch.float32)
    paged.cache.latent.normal_()
    paged.cache.rope.normal_()
    lengths = torch.tensor([70, 1, 128], dtype=torch.int32)
    table = torch.tensor([[5, 2, 7], [1, 7, 7], [0, 6, 7]], dtype=torch.int32)
    batch = DecodeBatch(lengths, torch.ones_like(lengths), table, torch.full((3,), -1))
    query = torch.randn(3, 3, 40)
    out, lse = device.flashinfer_history(paged, query, batch, torch.empty(0))()
    ours = partial_attention(
        query[..., :32], query[..., 32:], paged.cache, batch, AttentionKind.HISTORY, dims
    )
    torch.testing.assert_close(ours[0].double(), out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        ours[1].double(), lse * torch.tensor(2.0).log(), rtol=1e-4, atol=1e-4
    )


def test_the_page_has_the_floors_that_the_script_computes() -> None:
    command = [sys.executable, str(SCRIPT), "--floors"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.count("\n") > 25
    assert table in (SCRIPT.parents[1] / "docs" / "cuda.md").read_text()


def test_quick_on_cpu_checks_every_kernel(tmp_path: Path) -> None:
    out = tmp_path / "device.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert content["failed"] == []
    assert len(content["checks"]) > 30
    assert {timing["section"] for timing in content["timings"]} >= {
        "pack", "merge", "V-up", "history BF16", "history FP8 cache", "step, copy exchange",
    }  # fmt: skip
    for timing in content["timings"]:
        assert timing["seconds"] > 0
        assert timing["floor"] > 0


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_an_npu_that_is_not_there_is_named() -> None:
    command = [sys.executable, str(SCRIPT), "--device", "npu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("error: torch_npu: not installed\n")
