"""What is shown of a URL: all but its credentials."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.urls import local_path, shown_text, shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h/a.jsonl", "https://h/a.jsonl"),
        ("https://h/a.jsonl?part=1&x=%20", "https://h/a.jsonl?part=1&x=%20"),
        ("https://me:pw@h:8080/a?v=2", "https://h:8080/a?v=2"),
        ("https://token@h/a", "https://h/a"),
        ("https://h/a?X-Amz-Signature=s&X-Amz-Expires=9&X-Amz-Credential=c&part=2", "https://h/a?part=2"),
        ("https://h/a?X-Goog-Signature=s&X-Goog-Date=d", "https://h/a"),
        ("https://h/a?AWSAccessKeyId=a&Signature=s&Expires=1", "https://h/a"),
        ("https://h/a?sv=2020&se=1&sr=b&sp=r&sig=s", "https://h/a"),
        ("https://h/a?Policy=p&Key-Pair-Id=k&Signature=s", "https://h/a"),
        ("https://h/a?access_token=x&api_key=y&password=z", "https://h/a"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("hf://datasets/o/n@main/a.parquet", "hf://datasets/o/n@main/a.parquet"),
        ("https://[bad/a?sig=s", "https://..."),
    ],
)
def test_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown
    assert shown_text(f"error at '{url}' (see log)") == f"error at '{shown}' (see log)"


@given(st.text(alphabet="h:.=&%x'", max_size=20), st.text(alphabet="abc", min_size=1))
def test_a_secret_in_any_surroundings(around: str, letters: str) -> None:
    secret = letters * 9
    for url in (f"https://u:{secret}@h/{around}", f"https://h/{around}?sig={secret}&{around}"):
        assert secret not in shown_url(url)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///a%20b", "/a b"),
        ("file://localhost/a", "/a"),
        ("local:///a%20b", "/a%20b"),
        ("s3://b/c", None),
    ],
)
def test_local(url: str, path: str | None) -> None:
    assert local_path(url) == path
