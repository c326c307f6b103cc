"""Anabranch: MLA decode context parallelism for PyTorch.

The decode step is in `anabranch.schedules`; its operations are in `anabranch.step`.
"""

from anabranch.attention import AttentionKind, partial_attention
from anabranch.cache import DecodeBatch, LatentCache
from anabranch.capture import CapturedStep
from anabranch.decoder import DCPDecoder
from anabranch.exchange import ExchangeError, exchange_partials, pack_partials, unpack_partials
from anabranch.geometry import MLADims, ShardLayout
from anabranch.merge import merge_partials
from anabranch.mla import MLAAttention
from anabranch.schedules import Schedule
from anabranch.streams import StreamError
from anabranch.vup import v_up

__version__ = "0.1.0"

__all__ = [
    "AttentionKind",
    "CapturedStep",
    "DCPDecoder",
    "DecodeBatch",
    "ExchangeError",
    "LatentCache",
    "MLAAttention",
    "MLADims",
    "Schedule",
    "ShardLayout",
    "StreamError",
    "exchange_partials",
    "merge_partials",
    "pack_partials",
    "partial_attention",
    "unpack_partials",
    "v_up",
]
