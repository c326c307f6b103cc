"""`anabranch generate`: continue prompts with a checkpoint, on N ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console

from anabranch.cli.options import (
    EMBEDDED,
    ChatOption,
    DeviceOption,
    DType,
    JSONOption,
    ModelOption,
    check_device,
    check_model,
    count_ranks,
    decimal,
    names,
    one_of,
    option,
    whole,
    world_size_of,
)
from anabranch.geometry import ShardLayout
from anabranch.launch import BadInput, Rank, is_first_rank, joined_world_size, run
from anabranch.schedules import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from anabranch.hf import Generation, GenerationStats

STDIN = "-"


@dataclass(frozen=True)
class Plan:
    """What every rank is told. `prompts` None: the first rank read them from its input."""

    path: Path
    dtype: DType
    schedule: Schedule
    interleave: int
    block_size: int
    max_tokens: int | None
    project_first: bool
    prompts: list[str] | None
    stream: bool
    stop: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)


def generate(
    model: ModelOption = EMBEDDED,
    dcp: Annotated[
        int | None,
        option(whole(1), "N", "Ranks that share the cache. Default: 1, or all that torchrun made."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Repeatable: a batch.")
    ] = None,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE|-", help="One prompt in each file; - is standard input."),
    ] = None,
    max_new_tokens: Annotated[int, option(whole(1), "N", "Longest continuation.")] = 64,
    temperature: Annotated[
        float, option(decimal("a number of at least 0", lambda x: x >= 0), "T", "0 is greedy.")
    ] = 0.0,
    top_p: Annotated[
        float,
        option(decimal("above 0 and at most 1", lambda x: 0 < x <= 1), "P", "1 is no limit."),
    ] = 1.0,
    top_k: Annotated[int, option(whole(0), "K", "0 is no limit.")] = 0,
    seed: Annotated[int, option(whole(0), "N", "Of the sampling.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Ends a continuation. Repeatable.")
    ] = None,
    chat: ChatOption = False,
    schedule: Annotated[
        Schedule,
        option(
            one_of(Schedule),
            names(Schedule, "|"),
            "Of the decode steps; prefill is always serial.",
        ),
    ] = Schedule.OVERLAP,
    dtype: Annotated[
        DType, option(one_of(DType), names(DType, "|"), "Of weights, cache and computation.")
    ] = DType.FLOAT32,
    project_first: Annotated[
        bool,
        typer.Option("--project-first", help="Project to V before the exchange: fewer bytes."),
    ] = False,
    interleave: Annotated[
        int, option(whole(1), "N", "Tokens dealt to a rank in a row; divides the block.")
    ] = 1,
    block_size: Annotated[int, option(whole(1), "N", "Tokens per block of the cache.")] = 16,
    max_tokens: Annotated[
        int | None,
        option(whole(1), "N", "Capacity of the cache, all ranks. Default: what is needed."),
    ] = None,
    prefill_chunk: Annotated[
        int, option(whole(1), "N", "Tokens per step of the prefill; bounds memory.")
    ] = 512,
    device: DeviceOption = "cpu",
    as_json: JSONOption = False,
) -> None:
    """Continue prompts with an MLA checkpoint, its latent cache sharded over N ranks.

    The text goes to standard output: of a single prompt, as it comes.
    What it cost goes to standard error.

    Examples:
      anabranch generate --dcp 2 --prompt-file examples/ledger.txt
      anabranch generate --model ~/DeepSeek-V2-Lite-Chat --chat --prompt "Hello"
      cat prompt.txt | anabranch generate --dcp 2 --prompt-file - --json
      torchrun --nproc-per-node 2 -m anabranch generate --prompt-file FILE
    """
    world_size = world_size_of(dcp)
    check_device(device, [world_size])
    try:
        ShardLayout(world_size, 0, interleave).check_block_size(block_size)
    except ValueError as error:
        raise BadInput(
            f"--interleave must divide --block-size {block_size}, got {interleave}"
        ) from error
    prompts = _read_prompts(prompt or [], prompt_file or [])
    plan = Plan(
        path=check_model(model, [world_size]),
        dtype=dtype,
        schedule=schedule,
        interleave=interleave,
        block_size=block_size,
        max_tokens=max_tokens,
        project_first=project_first,
        prompts=prompts,
        stream=len(prompt or []) + len(prompt_file or []) == 1 and not as_json,
        stop=tuple(stop or ()),
        settings={
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "chat": chat,
            "prefill_chunk": prefill_chunk,
        },
    )
    console = Console(stderr=True)
    status = console.status("")  # started by the first news: a fork must not find its thread
    written = 0

    def show(news: _Phase | str) -> None:
        nonlocal written
        if isinstance(news, _Phase):
            status.update(news.text)
            status.start()
            return
        status.stop()
        sys.stdout.write(news)
        sys.stdout.flush()
        written += len(news)

    try:
        result = run(world_size, _generate, plan, report=show, device=device)
    finally:
        status.stop()
    if result is None:  # another rank of the launcher's speaks
        return
    generations, stats = result
    if as_json:
        described = {"model": model, "dcp": world_size, "schedule": schedule.value}
        _print_json(described | {"dtype": dtype.value}, generations, stats)
    else:
        _print_text(generations, written)
        console.print(
            f"{stats.prefill_tokens} prompt tokens in {stats.prefill_seconds:.1f} s, "
            f"{stats.decode_tokens_per_second:.1f} tokens/s after them; "
            f"{count_ranks(world_size)}, {schedule.value}, {dtype.value}",
            highlight=False,
            style="dim",
            soft_wrap=True,
        )


def _print_json(
    described: dict[str, Any], generations: Sequence[Generation], stats: GenerationStats
) -> None:
    cost = asdict(stats) | {"decode_tokens_per_second": stats.decode_tokens_per_second}
    answer = {**described, "stats": cost, "generations": [asdict(each) for each in generations]}
    print(json.dumps(answer, indent=2, ensure_ascii=False))


def _print_text(generations: Sequence[Generation], written: int) -> None:
    if len(generations) == 1:
        print(generations[0].text[written:])
        return
    for number, generation in enumerate(generations, start=1):
        print(f"[{number}] {generation.text}")


def _read_prompts(texts: list[str], files: list[str]) -> list[str] | None:
    """Prompts in the order of the options; None on a rank that cannot read the input itself."""
    if not texts and not files:
        raise BadInput("--prompt or --prompt-file must be given")
    if files.count(STDIN) > 1:
        raise BadInput("--prompt-file - may be given only once")
    prompts = list(texts)
    for name in files:
        if name == STDIN and not is_first_rank():
            return None  # a launcher's ranks have one input between them
        try:
            text = sys.stdin.read() if name == STDIN else Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"--prompt-file must be a readable text, got {name}: {error}") from error
        prompts.append(text.removesuffix("\n"))
    # All ranks are to refuse alike: what only one has read is checked once all have it.
    if joined_world_size() is None or STDIN not in files:
        _check_prompts(prompts)
    return prompts


def _check_prompts(prompts: list[str]) -> None:
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise BadInput(
                f"--prompt and --prompt-file must not be empty, got {prompt!r} as prompt {number}"
            )


@dataclass(frozen=True)
class _Phase:
    """What the ranks are doing, for the terminal."""

    text: str


class _Streamer:
    """A Transformers streamer that reports the text as it settles.

    What a stop string may still cut off is held back, and so is a character not yet whole.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], rank: Rank
    ) -> None:
        self._tokenizer, self._stop, self._rank = tokenizer, stop, rank
        self._held = max(map(len, stop), default=1) - 1
        self._tokens: list[int] | None = None  # None until the prompt has come by
        self._reported = 0

    def put(self, value: torch.Tensor) -> None:
        if self._tokens is None:
            self._tokens = []
            return
        self._tokens += value.tolist()
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return
        found = [at for at in map(text.find, self._stop) if at >= 0]
        settled = text[: min(found, default=len(text) - self._held)]
        if len(settled) > self._reported:
            self._rank.report(settled[self._reported :])
            self._reported = len(settled)

    def end(self) -> None:
        """The rest comes with the result."""


def _generate(rank: Rank, plan: Plan) -> tuple[list[Generation], GenerationStats]:
    """The job of every rank."""
    from transformers.utils import logging

    from anabranch.hf import Engine

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if joined_world_size() is not None:
        plan = replace(plan, prompts=rank.share(plan.prompts))
    assert plan.prompts is not None
    _check_prompts(plan.prompts)
    rank.report(_Phase(f"loading {plan.path.name} on {count_ranks(rank.world_size)}"))
    try:
        engine = Engine.load(
            plan.path,
            group=rank.group,
            layout=ShardLayout(rank.world_size, rank.index, plan.interleave),
            dtype=getattr(torch, plan.dtype.value),
            schedule=plan.schedule,
            project_first=plan.project_first,
            block_size=plan.block_size,
            max_tokens=plan.max_tokens,
            device=rank.device,
        )
        rank.report(_Phase("reading the prompts"))
        generations = engine.generate(
            plan.prompts,
            stop=plan.stop,
            streamer=_Streamer(engine.tokenizer, plan.stop, rank)
            if plan.stream and rank.index == 0
            else None,
            **plan.settings,
        )
    except ValueError as error:
        raise BadInput(str(error)) from error
    assert engine.stats is not None
    return generations, engine.stats
