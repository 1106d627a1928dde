"""Models of the hub, against a stand-in for it: revisions become commits, weights come when asked for."""

from __future__ import annotations

import json

import huggingface_hub.constants
import pytest
from stand_in_hub import StandInHub

from batchgen.models.source import find_model, find_tokenizer
from batchgen.types import UsageError

HEADER = b"{}"
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER
MODEL = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": WEIGHTS, "sub/x.json": b"1"}
INDEX = json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).encode()


def _go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_finding_fetches_no_weights(hub: StandInHub) -> None:
    commit = hub.push("org/m", MODEL)
    source = find_model("org/m")
    source.check_weights()
    assert source.commit == commit
    assert sorted(hub.fetched) == ["config.json", "tokenizer.json"]
    assert (source.weights_folder() / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched[2:] == ["model.safetensors"]
    assert [file.name for file in source.weight_files()] == ["config.json", "model.safetensors"]


def test_only_the_weights_that_are_loaded_are_fetched(hub: StandInHub) -> None:
    shards = {"m-1.safetensors": b"1", "m-2.safetensors": b"2", "consolidated.safetensors": b"3"}
    index = {"model.safetensors.index.json": INDEX}
    hub.push("org/m", {"config.json": b"{}", **shards, **index, "pytorch_model.bin": b""})
    source = find_model("org/m")
    source.check_weights()
    hub.fetched.clear()
    source.fetch_weights()
    assert sorted(hub.fetched) == ["m-1.safetensors", "m-2.safetensors"]


def test_further_chat_templates_belong_to_the_tokenizer(hub: StandInHub) -> None:
    hub.push("org/m", {**MODEL, "additional_chat_templates/tool.jinja": b"x"})
    source = find_model("org/m")
    assert (source.tokenizer_folder() / "additional_chat_templates" / "tool.jinja").read_text() == "x"


def test_what_the_hub_has_no_weights_of_is_known_before_they_are_fetched(hub: StandInHub) -> None:
    hub.push("org/adapter", {"config.json": b"{}", "adapter_model.safetensors": WEIGHTS})
    hub.push("org/old", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(UsageError, match=r"^model\.path: org/adapter holds no weights"):
        find_model("org/adapter").check_weights()
    with pytest.raises(UsageError, match=r"^model\.path: org/old has its weights only as pickles"):
        find_model("org/old").check_weights()
    find_model("org/old", allow_pickle=True).check_weights()


def test_a_branch_becomes_a_commit_and_moving_it_changes_nothing(hub: StandInHub) -> None:
    first = hub.push("org/m", {**MODEL, "config.json": b'{"a": 1}'}, "v1")
    assert find_model("org/m", "v1").commit == first
    second = hub.push("org/m", {**MODEL, "config.json": b'{"a": 2}'}, "v1")
    assert find_model("org/m", "v1").commit == second
    pinned = find_model("org/m", first)
    assert pinned.commit == first
    assert (pinned.weights_folder() / "config.json").read_text() == '{"a": 1}'


def test_offline_uses_the_cache(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.push("org/m", MODEL)
    find_model("org/m").fetch_weights()
    _go_offline(monkeypatch)
    for revision in (None, "main", commit):
        source = find_model("org/m", revision)
        source.check_weights()
        assert source.commit == commit
        assert (source.weights_folder() / "model.safetensors").read_bytes() == WEIGHTS


def test_offline_without_weights_in_the_cache(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.push("org/m", MODEL)
    find_model("org/m")
    _go_offline(monkeypatch)
    for revision in (None, commit):
        with pytest.raises(UsageError, match=r"is in the cache without its weights, and the hub cannot be"):
            find_model("org/m", revision).check_weights()


def test_offline_without_anything_in_the_cache(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    _go_offline(monkeypatch)
    with pytest.raises(
        UsageError, match=r"^model\.tokenizer: org/m is not a local folder, is not in the cache"
    ):
        find_tokenizer("org/m")


def test_what_the_hub_refuses(hub: StandInHub) -> None:
    hub.push("org/m", MODEL)
    hub.gated.add("org/gated")
    with pytest.raises(
        UsageError, match=r"^model\.path: there is neither a folder org/none here nor a model"
    ):
        find_model("org/none")
    with pytest.raises(UsageError, match=r"^model\.revision: org/m has no branch, tag or commit 'v9'"):
        find_model("org/m", "v9")
    with pytest.raises(UsageError, match=r"^model\.path: org/gated asks for consent"):
        find_model("org/gated")
