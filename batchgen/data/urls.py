"""Input paths that are URLs, and how they are shown: without any credentials. Standard library only.

Messages, the manifest and the resolved copy of a job use `shown_url`; only the transport sees the URL itself.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}+://[^\s'\"<>]+")
# Signed links of S3, Google Cloud, Azure and CloudFront, and what else usually carries a secret.
_SECRET = re.compile(
    r"x-(amz|goog|ms)-.*|aws.*|googleaccessid|key-pair-id|policy|expires|sig|sign|.*signature.*|hmac|auth.*"
    r"|.*token.*|.*secret.*|.*passw.*|.*credential.*|.*api.?key.*|key|code|session.*"
    r"|s[eprtv]|srt|spr|ss|sks|skt|ske|skv|skoid|sktid",
    re.IGNORECASE,
)


def is_url(path: str) -> bool:
    """Whether `path` names its protocol."""
    return "://" in path


def protocol(url: str) -> str:
    """The part before `://`, in lower case."""
    return url.partition("://")[0].lower()


def local_path(url: str) -> str | None:
    """The path of a `file://` or `local://` URL, None for others."""
    if protocol(url) not in {"file", "local"}:
        return None
    path = url.partition("://")[2]
    return unquote(path.removeprefix("localhost")) if protocol(url) == "file" else path


def shown_url(url: str) -> str:
    """`url` without user, password and secret query parameters; what is left still tells files apart."""
    if not is_url(url) or not ("@" in url or "?" in url):
        return url
    if protocol(url) == "hf":  # org/name@revision: the @ is part of the path
        return url
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return url.partition("://")[0] + "://..."
    kept = [(name, value) for name, value in query if not _SECRET.fullmatch(name)]
    new_query = parts.query if len(kept) == len(query) else urlencode(kept)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=new_query))


def shown_text(text: str) -> str:
    """A sentence of a library with every URL in it as `shown_url` shows it."""
    return _URL.sub(lambda found: shown_url(found.group()), text)
