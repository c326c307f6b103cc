"""What Transformers itself computes, and how results are compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from checkpoints import PAD, model_class
from transformers import AutoConfig


class Reference:
    """Transformers' own model, with its eager attention."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        config = AutoConfig.from_pretrained(path)
        self.model: Any = model_class(config.model_type).from_pretrained(
            path, dtype=dtype, attn_implementation="eager"
        )
        self.model.eval()

    def logits(self, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
        """`[length, vocabulary]` for each prompt, run alone."""
        return [self._logits(tuple(prompt)) for prompt in prompts]

    @cache  # noqa: B019 - lives as long as the session
    def _logits(self, prompt: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([prompt])).logits[0].float()

    def generate(
        self, prompts: Sequence[list[int]], count: int, **settings: Any
    ) -> list[list[int]]:
        """Greedy tokens after each prompt of a left-padded batch."""
        return self._generate(tuple(map(tuple, prompts)), count, **settings)

    @cache  # noqa: B019 - lives as long as the session
    def _generate(
        self, prompts: tuple[tuple[int, ...], ...], count: int, **settings: Any
    ) -> list[list[int]]:
        columns = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (columns - len(prompt)) + [*prompt] for prompt in prompts])
        output = self.model.generate(
            ids,
            attention_mask=ids.ne(PAD).long(),
            max_new_tokens=count,
            do_sample=False,
            **settings,
        )
        return output[:, columns:].tolist()


def difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Largest relative difference of a sequence's logits, by the Frobenius norm."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))


def median_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Median relative difference of a token's logits.

    In half precision a router chooses another expert now and then: tokens far off are no fault.
    """
    ours, theirs = torch.cat(list(ours)), torch.cat(list(theirs))
    return ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median().item()
