"""vllm-ascend's own sources, loaded without an NPU, and our adapter in them: prints JSON.

    python tests/vllm/ascend_job.py FOLDER

FOLDER holds the package `vllm_ascend` as published. Its three modules of MLA are imported as they
are. All else of it, and `torch_npu`, are stand-ins that know nothing; the few operators of the NPU
that a decode step of one layer calls on its way are written out here for CPU.

Printed are the parameters of every method that the adapter overrides, its own beside theirs, and
the largest relative error of a decode step on two ranks, with vllm-ascend's code around ours.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

from anabranch import Schedule, ShardLayout
from anabranch.launch import Rank, run
from anabranch.vllm_plugin import ASCEND_SCHEDULE
from problem import Problem, dims, relative_error

MLA = "vllm_ascend.attention.context_parallel.mla_cp"
AS_PUBLISHED = {
    "vllm_ascend.attention",
    "vllm_ascend.attention.context_parallel",
    "vllm_ascend.attention.context_parallel.common_cp",
    "vllm_ascend.attention.mla_v1",
    MLA,
}


class StandIn(ModuleType):
    """A module that has whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class StandIns(MetaPathFinder, Loader):
    """Finds a stand-in for each module that is not loaded as published."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package == "torch_npu" or (package == "vllm_ascend" and name not in AS_PUBLISHED):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def load(folder: Path) -> Any:
    """The adapter's module, with vllm-ascend's around it."""
    sys.meta_path.insert(0, StandIns())
    package = ModuleType("vllm_ascend")
    package.__path__ = [str(folder / "vllm_ascend")]
    sys.modules["vllm_ascend"] = package
    torch.npu = StandIn("torch.npu")
    npu = importlib.import_module("torch_npu")
    npu.npu_interleave_rope = lambda x, cos, sin: x
    npu.npu_kv_rmsnorm_rope_cache = store
    npu.npu_transpose_batchmatmul = lambda x, y, perm_x1, perm_y: torch.bmm(
        x.permute(perm_x1), y
    ).permute(perm_y)
    adapter = importlib.import_module("anabranch.vllm_plugin.ascend")
    adapter._EXTRA_CTX.capturing = False
    importlib.import_module("vllm_ascend.attention.mla_v1").TRANSPOSE_BMM_MAX_SUPPORTED_DIM = 65536
    return adapter


def store(
    kv: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    *,
    is_output_kv: bool,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """The operator that stores the latents, without its norm and rotation."""
    latent, rope = kv.split([latent_cache.shape[-1], rope_cache.shape[-1]], dim=-1)
    own = slots >= 0
    latent_cache.flatten(0, 1)[slots[own]] = latent[own, :, 0]
    rope_cache.flatten(0, 1)[slots[own]] = rope[own, :, 0]
    assert is_output_kv, "the adapter needs this step's latents"
    return rope_cache, latent_cache, rope, latent


def parameters(adapter: Any) -> dict[str, list[list[str]]]:
    """`{method: [ours, theirs]}` for all that is overridden."""
    found = {}
    for ours in (adapter.MLADCPImpl, adapter.MLADCPMetadataBuilder):
        (theirs,) = ours.__bases__
        for name, method in vars(ours).items():
            if name.startswith("__") or name == "_refuse" or not callable(getattr(ours, name)):
                continue
            own = method.__func__ if isinstance(method, classmethod) else method
            other = getattr(theirs, name)
            found[name] = [
                list(inspect.signature(each).parameters)
                for each in (own, getattr(other, "__func__", other))
            ]
    return found


def steps(rank: Rank, folder: Path) -> dict[str, float]:
    """The larger error of both ranks, under every schedule and with stripes of 1 and 4."""
    adapter = load(folder)
    errors = {}
    for schedule in Schedule:
        os.environ[ASCEND_SCHEDULE] = schedule.value
        for interleave in (1, 4):
            each: list[Any] = [None] * rank.world_size
            dist.all_gather_object(each, step(adapter, rank, interleave), group=rank.group)
            errors[f"{schedule.value}, {interleave}"] = max(each)
    return errors


def step(adapter: Any, rank: Rank, interleave: int) -> float:
    """One decode step through vllm-ascend's preprocessing, our attention, its projection."""
    problem = Problem([0, 1, 40, 33], [1, 3, 1, 2], dims(4))
    layout = ShardLayout(rank.world_size, rank.index, interleave)
    heads = problem.dims.num_heads // rank.world_size
    own = slice(rank.index * heads, (rank.index + 1) * heads)
    latent, rope = problem.dims.kv_lora_rank, problem.dims.qk_rope_head_dim
    cache, plan = problem.shard(layout)

    layer = make_layer(adapter, rank, problem, heads)
    layer.W_UV = problem.w_uv[own]
    layer.W_UK_T = torch.eye(latent).expand(heads, latent, latent)
    pages = tuple(part.contiguous().unsqueeze(2) for part in (cache.latent, cache.rope))
    query_lens = torch.tensor(problem.new)
    totals = torch.tensor(problem.past) + query_lens
    decode = sys.modules[MLA].AscendMLADCPDecodeMetadata(
        input_positions=None,
        block_table=plan.block_table,
        seq_lens=totals,
        max_seq_lens=int(totals.max()),
        seq_lens_list=totals.tolist(),
        actual_seq_lengths_q=query_lens.cumsum(0).tolist(),
    )
    decode.update_dcp_seq_lens_cpu(
        totals,
        torch.tensor([layout.local_length(total) for total in totals.tolist()]),
        query_lens,
        dcp_size=rank.world_size,
        dcp_rank=rank.index,
        cp_kv_cache_interleave_size=interleave,
    )
    metadata = SimpleNamespace(
        decode=decode,
        causal=True,
        num_decodes=len(problem.new),
        num_decode_tokens=problem.tokens,
        slot_mapping=plan.slot_mapping,
    )
    preprocessed = layer.mla_preprocess_decode(
        problem.queries[:, own].flatten(1), problem.current_keys, pages, metadata
    )
    output = layer._forward_decode(preprocessed, cache.block_size, metadata)
    expected = problem.projected_answer().view(problem.tokens, -1, problem.dims.v_head_dim)
    assert latent + rope == problem.current_keys.shape[1]
    return relative_error(output, expected[:, own].flatten(1))


def make_layer(adapter: Any, rank: Rank, problem: Problem, heads: int) -> Any:
    """A layer whose parents' constructors are replaced by what they would set."""
    whole = problem.dims

    def set_up(self: Any) -> None:
        self.num_heads, self.num_kv_heads, self.scale = heads, 1, whole.scale
        self.kv_lora_rank, self.qk_rope_head_dim = whole.kv_lora_rank, whole.qk_rope_head_dim
        self.qk_nope_head_dim, self.v_head_dim = whole.kv_lora_rank, whole.v_head_dim
        self.qk_head_dim = whole.latent_width
        self.mlapo_num_heads = heads
        self.q_proj = lambda x: (x, None)
        self.kv_a_layernorm = SimpleNamespace(weight=None, variance_epsilon=0.0)
        self.use_mla_rope = True
        self.enable_kv_nz = self.fa_quant_layer = self.support_fp8_attention = False
        self.dcp_size, self.dcp_rank = rank.world_size, rank.index
        self.dcp_device_group = rank.group

    adapter.AscendMlaDCPImpl.__init__ = set_up
    adapter.this_device = lambda: torch.device("cpu")
    adapter.get_current_vllm_config = lambda: SimpleNamespace(
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1), speculative_config=None
    )
    return adapter.MLADCPImpl()


def main(folder: Path) -> None:
    errors = run(2, steps, folder)  # before anything is loaded here: ranks are forks
    adapter = load(folder)
    backend = sys.modules["vllm_ascend.attention.mla_v1"].AscendMLABackend
    adapter.attach()
    enabled = sys.modules["vllm_ascend.attention.utils"].enable_dcp
    named = {}
    for sharded in (True, False):
        enabled.return_value = sharded
        named[str(sharded)] = [
            backend.get_impl_cls().__name__,
            backend.get_builder_cls().__name__,
        ]
    print(json.dumps({"errors": errors, "parameters": parameters(adapter), "named": named}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
