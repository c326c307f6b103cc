"""V-up against transpose-bmm-transpose and against plain PyTorch.

    python benchmarks/vup.py
    python benchmarks/vup.py --quick

`moves` are the two copies of transpose-bmm-transpose without the product: what V-up saves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import typer
from measure import OUT, OutOption, QuickOption, Report, interleave, lines_of, plot_lines

from anabranch import v_up
from anabranch.vup import v_up_transposed, workspace_bytes

RANK, V = 512, 128


def main(quick: QuickOption = False, out: OutOption = OUT) -> None:
    """Measure the projection of merged latents to V on one thread."""
    report = Report("vup", quick)
    torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float32):
        for heads in (16,) if quick else (16, 128):
            for tokens in (1, 4, 64) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256):
                case = report.add(
                    "v_up",
                    {"dtype": str(dtype).removeprefix("torch."), "heads": heads, "tokens": tokens},
                    interleave(contenders(heads, tokens, dtype), 5 if quick else 15),
                    [("transposed", "v_up"), ("plain torch", "v_up"), ("moves", "v_up")],
                )
                case.figures["GFLOP/s"] = (
                    2 * tokens * heads * RANK * V / case.seconds["v_up"].median / 1e9
                )
    ratios = [case.ratios["transposed / v_up"].median for case in report.section("v_up")]
    report.at_least("times transpose-bmm-transpose", ratios, 1.2)
    plain = [case.ratios["plain torch / v_up"].median for case in report.section("v_up")]
    report.at_least("times plain torch", plain, 1.2)
    report.finish(out)
    panels = lines_of(report.section("v_up"), "tokens", ("dtype", "heads"))
    plot_lines(out / "vup.png", panels, "tokens", "seconds")


def contenders(heads: int, tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    x = torch.randn(tokens, heads, RANK, dtype=dtype)
    w_uv = torch.randn(heads, RANK, V, dtype=dtype)
    out = torch.empty(tokens, heads * V, dtype=dtype)
    by_head = torch.empty(heads, tokens, V, dtype=dtype)
    workspace = torch.empty(workspace_bytes(RANK, V), dtype=torch.uint8)

    def plain() -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), w_uv).transpose(0, 1).flatten(1)

    def moves() -> None:
        x.transpose(0, 1).contiguous()
        out.view(tokens, heads, V).copy_(by_head.transpose(0, 1))

    return {
        "v_up": lambda: v_up(x, w_uv, out=out, workspace=workspace),
        "transposed": lambda: v_up_transposed(x, w_uv, out=out, workspace=workspace),
        "plain torch": plain,
        "moves": moves,
    }


if __name__ == "__main__":
    typer.run(main)
