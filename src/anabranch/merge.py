"""The algebra of partial attention: merging by log-sum-exp.

With partial outputs o_i normalised over their own keys and l_i = log sum exp of their scores,
attention over the union of the keys is `sum_i w_i o_i` with `w_i = exp(l_i - l)` and
`l = log sum_i exp(l_i)` (FlashDecoding; Ye et al., arXiv 2501.01005, section 2.2).
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p

import torch

from anabranch import native, triton_kernels
from anabranch.streams import launch

SHARE_ELEMENTS = 65536  # of all partials: what is worth another thread


def merge_partials(
    outs: torch.Tensor,
    lses: torch.Tensor,
    local_output: torch.Tensor | None = None,
    local_lse: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge N received partials, and one local pair where given, each read in place.

    `outs` `[N, T, H, D]` and `lses` `[N, T, H]` FP32 natural log; `local_output` `[T, H, D]`,
    `local_lse` `[T, H]`. Returns `[T, H, D]` in the dtype of `outs` (or that of `out`) and the
    merged LSE `[T, H]`. Sums run in FP32.

    A partial whose LSE is not finite (-inf, +inf and NaN all mark "no keys" among peers) has
    weight 0, and its payload is set to 0 before it is multiplied, so whatever it holds cannot
    reach the output. Where every partial is empty the output is 0 and the LSE -inf.
    """
    if (local_output is None) != (local_lse is None):
        raise ValueError("local_output and local_lse must be given together")
    if outs.dim() != 4 or lses.shape != outs.shape[:3]:
        raise ValueError(
            f"outs and lses must be [N, T, H, D] and [N, T, H], "
            f"got {list(outs.shape)} and {list(lses.shape)}"
        )
    partials = list(zip(outs, lses, strict=True))
    if local_output is not None and local_lse is not None:
        if local_output.shape != outs.shape[1:] or local_lse.shape != lses.shape[1:]:
            raise ValueError(
                f"local_output and local_lse must be {list(outs.shape[1:])} and "
                f"{list(lses.shape[1:])}, got {list(local_output.shape)} and "
                f"{list(local_lse.shape)}"
            )
        partials.append((local_output, local_lse))
    if out is None:
        out = outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])
    contiguous = out[0].is_contiguous() and out[1].is_contiguous()
    if contiguous and triton_kernels.serve(out[0].device, out[1].numel()):
        from anabranch.triton_kernels.merge import merge_launch

        local = None if local_output is None or local_lse is None else (local_output, local_lse)
        merge_launch(outs, lses, local, *out).run()
        return out
    library = native.library() if out[0].device.type == "cpu" else None
    if library is None or out[0].dtype not in native.DTYPES:
        _merge(partials, *out)
    else:
        _merge_native(library, partials, *out)
    return out


def _merge_native(
    library: native.Library,
    partials: list[tuple[torch.Tensor, torch.Tensor]],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """One pass over the rows, which are read where they are if they are evenly spaced."""
    rows = [(_even_rows(payload), _even_rows(log)) for payload, log in partials]
    count = len(rows)
    pointers, strides, dtypes = c_void_p * count, c_int64 * count, c_int32 * count
    arguments = (
        pointers(*(payload.data_ptr() for payload, _ in rows)),
        strides(*(payload.stride(1) for payload, _ in rows)),
        dtypes(*(native.DTYPES[payload.dtype] for payload, _ in rows)),
        pointers(*(log.data_ptr() for _, log in rows)),
        strides(*(4 * log.stride(1) for _, log in rows)),
        count, out.shape[-1], out.data_ptr(), native.DTYPES[out.dtype], lse.data_ptr(),
    )  # fmt: skip
    total = lse.numel()
    shares = min(torch.get_num_threads(), 1 + total * out.shape[-1] * count // SHARE_ELEMENTS)

    def merge_share(share: int) -> None:
        first, last = total * share // shares, total * (share + 1) // shares
        library.kernels.anabranch_merge(*arguments, first, last)

    launch(
        "anabranch_merge",
        lambda: native.in_shares(merge_share, shares),
        reads=[tensor for row in rows for tensor in row],
        writes=(out, lse),
    )


def _even_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` `[T, H, ...]`, copied unless its T*H rows are evenly spaced and dense."""
    even = tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    dense = tensor.dim() == 2 or tensor.stride(2) == 1
    return tensor if even and dense else tensor.contiguous()


def _merge(
    partials: list[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor, lse: torch.Tensor
) -> None:
    logs = torch.stack([log for _, log in partials])
    logs.masked_fill_(~logs.isfinite(), -torch.inf)
    peak = logs.amax(0)
    empty = peak == -torch.inf
    weights = torch.exp(logs - peak.masked_fill(empty, 0))
    total = weights.sum(0)
    weights /= total.masked_fill(empty, 1)
    merged = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for (payload, _), weight in zip(partials, weights, strict=True):
        column = weight.unsqueeze(-1)
        merged.addcmul_(torch.where(column > 0, payload, 0), column)
    out.copy_(merged)
    torch.add(peak, total.log(), out=lse)
