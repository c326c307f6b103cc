"""vLLM as on CUDA, without a GPU, and our backend in it: prints JSON.

    python tests/vllm/cuda_job.py CHECKPOINT CASES

vLLM's modules are those of the release, its platform is its own class for CUDA. Made up are the
device's capability and count, and the compiled extensions that only its CUDA wheel has are empty.
Tensors are in CPU memory, and the CUDA kernels run in Triton's interpreter.

Two ranks then run decode steps through vLLM's own layer, from the cache update to its projection,
with metadata from the builder. The first step is recorded, operator by operator and kernel by
kernel, as a graph would; the others run the record again, after nothing but the builder.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from interpreted import NoReadBack, on_triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anabranch import DecodeBatch, ShardLayout, streams
from anabranch.launch import Rank, run
from anabranch.streams.cpu import inline_streams
from problem import Problem, dims, relative_error

EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
DTYPE, SEQUENCES, TOKENS, PAGES, INTERLEAVE = torch.float16, 4, 10, 16, 4
LAYER = "model.layers.0.self_attn.attn"
# `(past, new)` of steps that one graph of 4 sequences and 10 rows serves: the rest is padding.
STEPS = [([64, 5, 0, 200], [1, 4, 1, 2]), ([0, 129], [3, 1])]


def on_cuda() -> Any:
    """vLLM's platform for CUDA, on a machine with eight devices whose capability is 9.0."""
    sys.modules.update({name: ModuleType(name) for name in EXTENSIONS})
    for kind in ("", "block_"):  # asked when vLLM's modules are loaded
        setattr(torch.ops._C, f"cutlass_scaled_mm_supports_{kind}fp8", lambda capability: False)
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Pretended(CudaPlatformBase):
        of = (9, 0)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*cls.of)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "pretended"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 1 << 37

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return (
                "vllm.distributed.device_communicators.base_device_communicator."
                "DeviceCommunicatorBase"
            )

    platforms._current_platform = Pretended()
    import anabranch.vllm_plugin

    anabranch.vllm_plugin.register()
    return Pretended


def configure(checkpoint: str, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        **{
            "model": checkpoint,
            "skip_tokenizer_init": True,
            "dtype": "float16",
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
            "attention_backend": "CUSTOM",
            "cp_kv_cache_interleave_size": INTERLEAVE,
            "max_num_seqs": SEQUENCES,
            "max_model_len": 2048,
            "compilation_config": {"max_cudagraph_capture_size": 16},
            # FlashAttention, which vLLM takes for prefill, wants DeepSeek's.
            "hf_overrides": {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        }
        | options
    ).create_engine_config()


def backend_for(config: Any) -> str:
    """The backend vLLM chooses for a layer, or why it refuses."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
    with set_current_vllm_config(config):
        try:
            chosen = selector.get_attn_backend(
                40, config.model_config.dtype, config.cache_config.cache_dtype, use_mla=True
            )
        except ValueError as error:
            return str(error)
    return f"{chosen.__module__}.{chosen.__qualname__}"


class Record(TorchDispatchMode):
    """What runs in the block, to run again on the same memory as a graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = function(*args, **kwargs)

        def again() -> None:
            for old, new in zip(
                tree_leaves(first), tree_leaves(function(*args, **kwargs)), strict=True
            ):
                if not isinstance(new, torch.Tensor):
                    new.wait()
                elif new.data_ptr() != old.data_ptr():
                    old.copy_(new)

        self.calls.append(again)
        return first

    def launch(self, name: str, kernel: Callable[[], Any], **accesses: Any) -> Any:
        self.calls.append(kernel)
        with torch.utils._python_dispatch._disable_current_modes():
            return kernel()

    def replay(self) -> None:
        for call in self.calls:
            call()


class Engine:
    """One layer of vLLM on one rank, and the memory that vLLM keeps from step to step."""

    def __init__(self, config: Any, rank: Rank) -> None:
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention
        from vllm.model_executor.layers.linear import ColumnParallelLinear
        from vllm.platforms import current_platform
        from vllm.utils.torch_utils import set_default_torch_dtype

        self.layout = ShardLayout(rank.world_size, rank.index, INTERLEAVE)
        whole = Problem([0], [1], dims(4), DTYPE)
        self.dims, heads = whole.dims, whole.dims.num_heads // rank.world_size
        self.own = slice(rank.index * heads, (rank.index + 1) * heads)
        latent, value = self.dims.kv_lora_rank, self.dims.v_head_dim
        projection = ColumnParallelLinear(
            latent,
            self.dims.num_heads * (latent + value),
            bias=False,
            params_dtype=DTYPE,
            prefix=f"{LAYER}.kv_b_proj",
        )
        self.weight = projection.weight.data.view(heads, latent + value, latent)
        with set_default_torch_dtype(DTYPE):
            self.layer = MLAAttention(
                num_heads=heads,
                scale=self.dims.scale,
                qk_nope_head_dim=latent,  # queries are absorbed as they are: see `load`
                qk_rope_head_dim=self.dims.qk_rope_head_dim,
                v_head_dim=value,
                q_lora_rank=None,
                kv_lora_rank=latent,
                kv_b_proj=projection,
                cache_config=config.cache_config,
                prefix=LAYER,
            )
        self.load(whole)
        current_platform.update_block_size_for_backend(config)
        spec = self.layer.get_kv_cache_spec(config)
        backend = self.layer.get_attn_backend()
        self.builder = backend.get_builder_cls()(spec, [LAYER], config, torch.device("cpu"))
        self.page_size = spec.block_size
        self.graphs = config.compilation_config.resolve_cudagraph_mode_and_sizes(
            self.builder.get_cudagraph_support(config, spec), backend.get_name(), 4
        ).name
        localise = self.builder._localise

        def watched(*arguments: Any) -> Any:
            with NoReadBack():
                return localise(*arguments)

        self.builder._localise = watched
        width = self.dims.latent_width
        self.layer.kv_cache = torch.full((PAGES, self.page_size, width), torch.nan, dtype=DTYPE)
        self.queries = torch.zeros(TOKENS, heads, width, dtype=DTYPE)
        self.current = torch.zeros(TOKENS, width, dtype=DTYPE)
        self.slots = torch.full((TOKENS,), -1)
        self.tables = torch.zeros(SEQUENCES, 8, dtype=torch.int32)
        self.starts = torch.zeros(SEQUENCES + 1, dtype=torch.int32)
        self.totals, self.locals = torch.zeros(2, SEQUENCES, dtype=torch.int32)
        self.output = torch.zeros(TOKENS, heads * value, dtype=DTYPE)

    def load(self, problem: Problem) -> None:
        """W_UK is the identity, W_UV the problem's."""
        latent = self.dims.kv_lora_rank
        self.weight[:, :latent] = torch.eye(latent)
        self.weight[:, latent:] = problem.w_uv[self.own].transpose(1, 2)
        self.layer.process_weights_after_loading(DTYPE)

    def prepare(self, problem: Problem) -> Any:
        """The step's inputs where vLLM has them, and its metadata. All of it padded."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        self.load(problem)
        cache, plan = problem.shard(self.layout)
        sequences, tokens = len(problem.new), problem.tokens
        self.layer.kv_cache[: cache.num_blocks] = torch.cat([cache.latent, cache.rope], -1)
        self.queries[:tokens] = problem.queries[:, self.own]
        self.current[:tokens] = problem.current_keys
        self.slots[:tokens], self.slots[tokens:] = plan.slot_mapping, -1
        self.tables[:sequences, : plan.block_table.shape[1]] = plan.block_table
        self.tables[sequences:] = 0
        ends = torch.tensor(problem.new).cumsum(0)
        self.starts[1 : sequences + 1], self.starts[sequences + 1 :] = ends, tokens
        totals = [past + new for past, new in zip(problem.past, problem.new, strict=True)]
        self.totals[:sequences], self.totals[sequences:] = torch.tensor(totals), 0
        for b, total in enumerate(self.totals.tolist()):
            self.locals[b] = self.layout.local_length(total)
        common = CommonAttentionMetadata(
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts.clone(),
            seq_lens=self.totals,
            seq_lens_cpu_upper_bound=self.totals.clone(),
            num_reqs=SEQUENCES,
            num_actual_tokens=TOKENS,
            max_query_len=max(problem.new),
            max_seq_len=max(totals),
            block_table_tensor=self.tables,
            slot_mapping=self.slots,
            dcp_local_seq_lens=self.locals,
        )
        return self.builder.build(0, common)

    def step(self, metadata: Any) -> None:
        """What vLLM's two operators of a layer do."""
        latent, layer = self.dims.kv_lora_rank, self.layer
        kv_c, k_pe = self.current[:, :latent], self.current[:, None, latent:]
        layer.update_kv_cache(
            kv_c, k_pe, layer.kv_cache, self.slots, metadata, "auto", layer._k_scale
        )
        layer.forward_impl(self.queries, kv_c, k_pe, layer.kv_cache, metadata, output=self.output)

    def error(self, problem: Problem) -> float:
        expected = problem.projected_answer()[:, self.own].flatten(1)
        return relative_error(self.output[: problem.tokens], expected)


def addresses(engine: Engine, metadata: Any) -> list[int]:
    """Where a graph reads lengths and tables, and where it writes."""
    batch = metadata.decode.batch
    tensors = batch.seq_lens, batch.query_lens, batch.block_table, batch.slot_mapping
    storage = engine.layer.impl.decoder._buffers._storage
    return [tensor.data_ptr() for tensor in (*tensors, *storage.values())]


def host_lens(batch: DecodeBatch) -> Any:
    raise AssertionError("lengths were read on the host")


def serve(rank: Rank, config: Any) -> dict[str, Any]:
    """Errors of steps, recorded and replayed; whether addresses stayed, and the cache is let go."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    from anabranch.vllm_plugin import backend

    errors, moved = [], 0
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(on_triton())
        stack.enter_context(streams.provide(inline_streams()))
        for target, name, value in (
            (backend, "this_device", lambda: torch.device("cpu")),
            (DecodeBatch, "host_lens", host_lens),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        parallel_state.init_distributed_environment(
            rank.world_size, rank.index, "env://", rank.index, backend="gloo"
        )
        parallel_state.initialize_model_parallel(
            rank.world_size, decode_context_model_parallel_size=rank.world_size, backend="gloo"
        )
        engine = Engine(config, rank)
        record: Record | None = None
        for past, new in STEPS:
            problem = Problem(past, new, engine.dims, DTYPE, engine.page_size)
            metadata = engine.prepare(problem)
            engine.output.fill_(torch.nan)
            if record is None:
                record, before = Record(), addresses(engine, metadata)
                with mock.patch.object(streams, "launch", record.launch), record, NoReadBack():
                    engine.step(metadata)
            else:
                record.replay()
            moved += before != addresses(engine, metadata)
            errors.append(engine.error(problem))
        buffer = weakref.ref(engine.layer.kv_cache)
        record = metadata = engine.layer.kv_cache = None
        gc.collect()
    each: list[Any] = [None] * rank.world_size
    dist.all_gather_object(each, errors, group=rank.group)
    return {
        "errors": [max(of_step) for of_step in zip(*each, strict=True)],
        "moved": moved,
        "held": buffer() is not None,
        "graphs": engine.graphs,
        "block_size": engine.page_size,
    }


def verdict(checkpoint: str, arguments: dict[str, Any], environment: dict[str, str]) -> str:
    """What vLLM says to a configuration when it looks for the backend of a layer."""
    with mock.patch.dict(os.environ, environment):
        return backend_for(configure(checkpoint, **arguments))


def main(checkpoint: str, cases: dict[str, Any]) -> None:
    platform = on_cuda()
    found = {name: verdict(checkpoint, *case) for name, case in cases.items()}
    config = configure(checkpoint)
    steps = run(2, serve, config)
    platform.of = (7, 5)
    print(json.dumps({"said": found | {"older": backend_for(config)}} | steps))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
