"""Which peer serves HISTORY on CUDA, if any. Without one it is Triton's."""

from __future__ import annotations

from anabranch.attention import flashinfer, flashmla
from anabranch.attention.peer import Peer, Shape

PEERS = (flashmla.PEER, flashinfer.PEER)


def serving(shape: Shape) -> Peer | None:
    """The peer for `shape` on this machine."""
    for peer in PEERS:
        if peer.takes(shape) and peer.missing() is None:
            return peer
    return None
