"""Content in parts: text is joined, everything else is an error of its row."""

from __future__ import annotations

import pytest

from batchgen.text.messages import read_messages
from batchgen.types import ErrorClass, RowFailure


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert read_messages("m", [{"role": "user", "content": parts}]) == [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("part", [{"type": "image", "url": "x"}, "plain", {"type": "text"}])
def test_other_parts_are_refused(part: object) -> None:
    with pytest.raises(RowFailure, match="only text parts can be read") as failure:
        read_messages("m", [{"role": "user", "content": [part]}])
    assert failure.value.error.error_class is ErrorClass.INVALID_PARAM
