"""An S3 on this machine for tests, and the environment that points every client of this process at it."""

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def serve_s3(*buckets: str) -> Iterator[dict[str, str]]:
    """The environment variables of the server, which are set; *buckets* are made.

    fsspec keeps the file systems that it has made, each with the address it was made for: those of an
    earlier server are forgotten before and after.
    """
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            forget_s3()
            for bucket in buckets:
                fsspec.filesystem("s3").mkdir(bucket)
            yield settings
    finally:
        forget_s3()
        server.stop()


def forget_s3() -> None:
    fsspec.get_filesystem_class("s3").clear_instance_cache()
