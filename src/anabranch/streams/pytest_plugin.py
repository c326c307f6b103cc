"""A pytest fixture that fails a test whose streams are not kept in order.

def test_my_step(stream_sanitizer):
    my_step()
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anabranch.streams.sanitizer import Sanitizer, sanitize


@pytest.fixture
def stream_sanitizer() -> Iterator[Sanitizer]:
    """Watches the test's streams (see `anabranch.streams.sanitizer.sanitize`).

    The test fails at its end if there are findings. A test that expects some reads them from
    `stream_sanitizer.findings`, and clears that list.
    """
    with sanitize() as sanitizer:
        yield sanitizer
    if sanitizer.findings:
        pytest.fail("\n".join(map(str, sanitizer.findings)), pytrace=False)
