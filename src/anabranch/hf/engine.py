"""Engine: a checkpoint loaded on the ranks of a group, and generation with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from anabranch.cache import LatentCache
from anabranch.geometry import ShardLayout
from anabranch.hf.architectures import SUPPORTED
from anabranch.hf.cache import CACHE_ARGUMENT, DCPCache
from anabranch.hf.checkpoint import CheckpointError, check_checkpoint
from anabranch.hf.convert import Converted, convert
from anabranch.schedules import Schedule

Prompt = str | Sequence[int]
"""Text, or token ids as they are."""


@dataclass(frozen=True)
class Generation:
    """What one prompt led to.

    `token_ids` are the generated tokens, a final stop token included; `text` is their text
    without special tokens, cut before the first stop string. `finish_reason` is "length" when
    `max_new_tokens` ended it.
    """

    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationStats:
    """Cost of one `generate` call. The first token of each sequence belongs to the prefill."""

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def decode_tokens_per_second(self) -> float:
        """Over the whole batch; 0 when nothing was decoded."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0


class _Lockstep(LogitsProcessor):
    """Gives every rank the scores of the first, and notes when the first token was ready.

    Equal weights and inputs do not make equal bits on unlike machines, and one token that differs
    would desynchronise the group for good.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.first_token_at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        if self._group is not None:
            scores = scores.contiguous()
            dist.broadcast(scores, group_src=0, group=self._group)
        return scores


class _StopStrings(StoppingCriteria):
    """Ends a sequence whose generated text contains one of the strings, and notes its length.

    Transformers' own criterion also matches a string that begins in the prompt.
    """

    SLACK = 8
    """Tokens decoded besides the last: a tokenizer treats the first of a text specially."""

    def __init__(
        self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase, columns: int, size: int
    ) -> None:
        self._strings, self._tokenizer, self._columns = strings, tokenizer, columns
        # A token has at least one byte, so no match reaches further back than its own bytes.
        self._window = self.SLACK + max((len(string.encode()) for string in strings), default=0)
        self.lengths: list[int | None] = [None] * size
        """Generated tokens of each sequence that has ended by a string."""

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        begin = max(self._columns, input_ids.shape[1] - self._window)
        for row, tokens in enumerate(input_ids[:, begin:].tolist()):
            if self.lengths[row] is None:
                text = _decode(self._tokenizer, tokens)
                if any(string in text for string in self._strings):
                    self.lengths[row] = input_ids.shape[1] - self._columns
        ended = [length is not None for length in self.lengths]
        return torch.tensor(ended, device=input_ids.device)


class Engine:
    """A checkpoint on the ranks of a group. Get one with `Engine.load`.

    Every rank loads it and makes the same calls with the same arguments, in the same order.
    `tokenizer`, `model`, `config` are Transformers' own; `layout` is this rank's share.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        converted: Converted,
        *,
        block_size: int,
        max_tokens: int | None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.layout = converted.decoder.layout
        self.stats: GenerationStats | None = None
        """Of the last `generate` call."""
        self._converted = converted
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._latents: dict[int, LatentCache] | None = None
        if max_tokens is not None:
            self._latents = self._allocate(self.layout.blocks_needed(max_tokens, block_size))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        group: dist.ProcessGroup | None = None,
        layout: ShardLayout | None = None,
        dtype: torch.dtype = torch.float32,
        schedule: Schedule = Schedule.OVERLAP,
        project_first: bool = False,
        block_size: int = 16,
        max_tokens: int | None = None,
        device: torch.device | str | None = None,
    ) -> Engine:
        """Load the checkpoint in directory `path`; every rank of `group` must take part.

        - `group`: the ranks; None: this process alone. `layout` defaults to interleave 1.
        - `dtype`: of weights, cache and computation.
        - `block_size`: tokens per block of the cache on each rank, a multiple of the interleave.
        - `max_tokens`: capacity of the cache in tokens, over the whole batch and all ranks,
          allocated at once. None: each `generate` call allocates what it may need.

        Raises CheckpointError when the checkpoint cannot be loaded (see `check_checkpoint`), is
        incomplete, or is not what its architecture promises; ValueError for other arguments.
        """
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        layout = ShardLayout(size, rank) if layout is None else layout
        if (layout.world_size, layout.rank) != (size, rank):
            raise ValueError(
                f"layout must have world_size {size} and rank {rank} as the group has, "
                f"got {layout.world_size} and {layout.rank}"
            )
        layout.check_block_size(block_size)
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        config = check_checkpoint(path, size)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, KeyError, OSError) as error:
            raise CheckpointError(f"{path} has no usable tokenizer: {error}") from error
        architecture = SUPPORTED[config.model_type]
        loader: Any = AutoModelForCausalLM
        if architecture.model is not None:
            loader = getattr(transformers, architecture.model)
        try:
            model, info = loader.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation="eager",  # for the probe of `convert`, which then replaces it
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error
        incomplete = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
        if incomplete:
            raise CheckpointError(
                f"{path} lacks {len(incomplete)} weights or has them in other shapes, the first: "
                f"{incomplete[0]}"
            )
        model.eval().requires_grad_(False).to("cpu" if device is None else device)
        converted = convert(
            model,
            architecture,
            layout,
            group,
            schedule,
            project_first=project_first,
        )
        return cls(model, tokenizer, converted, block_size=block_size, max_tokens=max_tokens)

    @property
    def config(self) -> PretrainedConfig:
        """Transformers' config of the model."""
        return self.model.config

    @property
    def schedule(self) -> Schedule:
        """Schedule of the decode steps; may be set between calls. Prefill is always serial."""
        return self._converted.decoder.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._converted.decoder.schedule = schedule

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        chat: bool = False,
        prefill_chunk: int = 512,
        streamer: Any = None,
    ) -> list[Generation]:
        """Continue every prompt by Transformers' own `model.generate`, as one batch.

        - `temperature` 0: greedy. Otherwise sampled with `top_p`, `top_k` (0: no limit), `seed`;
          all ranks draw the same tokens, and the caller's random state is left alone.
        - `stop`: strings that end a sequence when its generated text contains them, and
          `stop_token_ids`: tokens that do, besides the checkpoint's own end tokens.
        - `chat`: each prompt is a user's message, put into the tokenizer's chat template.
        - `prefill_chunk`: columns of the batch per prefill step; bounds memory.
        - `streamer`: a Transformers streamer, for a single prompt; give it on one rank only.

        Other settings, as a repetition penalty, come from the checkpoint's generation config.

        Raises ValueError, before any work, for an argument out of range, an empty prompt, or
        prompts and new tokens that exceed `max_tokens`.
        """
        _require(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "at least 1")
        _require(temperature >= 0, "temperature", temperature, "at least 0")
        _require(0 < top_p <= 1, "top_p", top_p, "above 0 and at most 1")
        _require(top_k >= 0, "top_k", top_k, "at least 0")
        _require(prefill_chunk >= 1, "prefill_chunk", prefill_chunk, "at least 1")
        named = not isinstance(stop, str) and all(stop)
        _require(named, "stop", stop, "a sequence of strings that are not empty")
        ids = self._encode(prompts, chat)
        cache = self._cache(
            [len(prompt) + max_new_tokens for prompt in ids], "prompts and max_new_tokens"
        )
        input_ids, attention_mask = self._pad(ids)

        ends = [*self._end_tokens(), *stop_token_ids]
        sampled = temperature > 0
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max_new_tokens,
            do_sample=sampled,
            # Greedy: the defaults of Transformers, which warns about others.
            temperature=temperature if sampled else 1.0,
            top_p=top_p if sampled else 1.0,
            top_k=top_k if sampled else 50,
            num_beams=1,
            eos_token_id=ends or None,
            pad_token_id=self._pad_token(),
            prefill_chunk_size=prefill_chunk,
            use_cache=True,
        )
        lockstep = _Lockstep(self._converted.decoder.group)
        strings = _StopStrings(stop, self.tokenizer, input_ids.shape[1], len(ids))
        devices = [] if self.model.device.type == "cpu" else [self.model.device]
        begin = time.perf_counter()
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            model: Any = self.model
            sequences = model.generate(
                input_ids,
                attention_mask=attention_mask,
                generation_config=config,
                **{CACHE_ARGUMENT: cache},
                logits_processor=LogitsProcessorList([lockstep]),
                stopping_criteria=StoppingCriteriaList([strings] if stop else []),
                streamer=streamer,
            )
        end = time.perf_counter()

        rows = sequences[:, input_ids.shape[1] :].tolist()
        generations = [
            self._finish(len(prompt), tokens, set(ends), stop, length)
            for prompt, tokens, length in zip(ids, rows, strings.lengths, strict=True)
        ]
        first = end if lockstep.first_token_at is None else lockstep.first_token_at
        self.stats = GenerationStats(
            prefill_tokens=sum(map(len, ids)),
            prefill_seconds=first - begin,
            decode_tokens=sum(len(generation.token_ids) - 1 for generation in generations),
            decode_seconds=end - first,
        )
        return generations

    @torch.no_grad()
    def logits(
        self, input_ids: Sequence[Sequence[int]], *, prefill_chunk: int = 512
    ) -> list[torch.Tensor]:
        """Logits after every token of every sequence: one FP32 `[length, vocabulary]` for each.

        All logits are held in memory at once. Errors as for `generate`.
        """
        _require(prefill_chunk >= 1, "prefill_chunk", prefill_chunk, "at least 1")
        ids = self._encode(input_ids, chat=False)
        cache = self._cache([len(sequence) for sequence in ids], "input_ids")
        padded, mask = self._pad(ids)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        columns = padded.shape[1]
        chunks = []
        for begin in range(0, columns, prefill_chunk):
            end = min(begin + prefill_chunk, columns)
            output = self.model(
                input_ids=padded[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                use_cache=True,
                **{CACHE_ARGUMENT: cache},
            )
            chunks.append(output.logits.float())
        logits = torch.cat(chunks, dim=1)
        return [row[columns - len(sequence) :] for row, sequence in zip(logits, ids, strict=True)]

    def new_cache(self, lengths: Sequence[int]) -> DCPCache:
        """The `cache` argument for calling `model` or `model.generate` directly, on every rank.

        `lengths` are the most tokens each sequence of the batch may reach. With `max_tokens` all
        caches share one memory: only the newest is valid. Raises ValueError when `max_tokens`
        cannot hold them.
        """
        return self._cache(lengths, "lengths")

    def _encode(self, prompts: Sequence[Prompt], chat: bool) -> list[list[int]]:
        if isinstance(prompts, str) or not prompts:
            raise ValueError("prompts must be a sequence of one or more prompts")
        if chat and self.tokenizer.chat_template is None:
            raise ValueError("chat must be False: the tokenizer has no chat template")
        encoded = []
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                ids = list(prompt)
            elif chat:
                text = self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}],
                    add_generation_prompt=True,
                    tokenize=False,
                )
                # The template has written the special tokens already.
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            else:
                ids = self.tokenizer(prompt)["input_ids"]
            if not ids:
                raise ValueError(f"prompts[{index}] must have at least one token, got none")
            if not 0 <= min(ids) <= max(ids) < self.config.vocab_size:
                raise ValueError(
                    f"prompts[{index}] must have tokens in [0, {self.config.vocab_size}), got "
                    f"{min(ids)} to {max(ids)}"
                )
            encoded.append(ids)
        return encoded

    def _pad(self, ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Left-padded `[B, columns]` and its attention mask."""
        columns = max(map(len, ids))
        padded = torch.full((len(ids), columns), self._pad_token())
        mask = torch.zeros_like(padded)
        for row, sequence in enumerate(ids):
            padded[row, columns - len(sequence) :] = torch.tensor(sequence)
            mask[row, columns - len(sequence) :] = 1
        return padded.to(self.model.device), mask.to(self.model.device)

    def _end_tokens(self) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        if ends is None:
            ends = self.tokenizer.eos_token_id
        if ends is None:
            return []
        return [ends] if isinstance(ends, int) else list(ends)

    def _pad_token(self) -> int:
        """Any token will do: padding is neither attended to nor stored."""
        pad = self.tokenizer.pad_token_id
        return 0 if pad is None else int(pad)

    def _allocate(self, num_blocks: int) -> dict[int, LatentCache]:
        return {
            index: LatentCache(
                num_blocks,
                self._block_size,
                self._converted.dims,
                self.model.dtype,
                self.model.device,
            )
            for index in self._converted.layer_indices
        }

    def _cache(self, lengths: Sequence[int], source: str) -> DCPCache:
        """`new_cache`, with the name of what asks for these lengths."""
        needed = sum(self.layout.blocks_needed(length, self._block_size) for length in lengths)
        latents = self._latents
        if latents is None:
            latents = self._allocate(needed)
        available = next(iter(latents.values())).num_blocks
        if needed > available:
            stripe = self._block_size * self.layout.world_size
            raise ValueError(
                f"{source} need {sum(lengths)} tokens of cache, {needed} blocks of "
                f"{stripe}; max_tokens {self._max_tokens} allows {available}"
            )
        others: dict[int, Any] = {}
        if getattr(self.config, "layer_types", None) is not None:
            layers = DynamicCache(config=self.config).layers
            others = {index: layer for index, layer in enumerate(layers) if index not in latents}
        return DCPCache(self.layout, latents, others)

    def _finish(
        self,
        prompt_tokens: int,
        tokens: list[int],
        ends: set[int],
        stop: Sequence[str],
        length: int | None,
    ) -> Generation:
        """Cut what the batch went on to generate after this sequence had ended.

        `length` counts its tokens up to the end of a stop string, None: there was none.
        """
        reason: Literal["stop", "length"] = "length"
        if length is not None:
            tokens, reason = tokens[:length], "stop"
        for count, token in enumerate(tokens, start=1):
            if token in ends:
                tokens, reason = tokens[:count], "stop"
                break
        text = _decode(self.tokenizer, tokens)
        cut = min((at for at in map(text.find, stop) if at >= 0), default=len(text))
        return Generation(prompt_tokens, tokens, text[:cut], reason)


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value}")
