"""Loading from a folder, and what the files say."""

import subprocess
import sys

import pytest
from tiny_tokenizers import byte_fallback, byte_level, metaspace

from batchgen.text.tokenizer import GROUP, Tokenizer, fingerprint
from batchgen.types import UsageError


@pytest.fixture
def folder(tmp_path):
    byte_fallback().hf.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_tokenizer_loads_the_same(folder):
    loaded, made = Tokenizer.load(str(folder)), byte_fallback()
    texts = ["hello 你 <s> world"] * (GROUP + 1)
    assert loaded.encode_batch(texts) == made.encode_batch(texts)
    assert loaded.chat_template == made.chat_template
    assert loaded.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    assert loaded.prefix_ids == (1,)
    assert loaded.vocab_size == len(loaded.hf)


def test_encoding_is_that_of_transformers():
    for tokenizer in (byte_level(), byte_fallback(), metaspace()):
        text = "hello <|im_end|></s> a"
        assert tokenizer.encode_batch([text]) == [tokenizer.hf(text, add_special_tokens=False).input_ids]
    assert byte_level().encode_batch([]) == []


def test_prefix_of_plain_text():
    assert byte_level().prefix_ids == ()
    assert byte_fallback().prefix_ids == (1,)


def test_the_fingerprint_is_of_the_tokenizers_files(folder):
    before = fingerprint(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    assert fingerprint(folder) == before == Tokenizer.load(str(folder)).fingerprint()
    (folder / "chat_template.jinja").write_text("other")
    assert fingerprint(folder) != before
    assert byte_level().fingerprint() != byte_fallback().fingerprint()


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(UsageError, match=r"holds no tokenizer that loads.*tokenizer\.json"):
        Tokenizer.load(str(tmp_path))


def test_checking_a_section_loads_no_heavy_library():
    code = (
        "import sys; from batchgen.text.prompt import PromptSpec;"
        "PromptSpec.from_dict({'user': '{{ a }}'}).bind(['a']);"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'pyarrow') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
@pytest.mark.parametrize("text", ["hello world", "h\u00e9llo \u4f60", "<|im_end|>a", "  ab"])
def test_bytes_of_tokens_make_the_text(make, text):
    tokenizer = make()
    ids = tokenizer.encode_batch([text])[0]
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    # Such tokenizers put a space before every text, and decoding takes it away again.
    assert joined.lstrip(" ") == tokenizer.decode_all(ids).lstrip(" ")
    assert tokenizer.token_bytes(1 << 30) == b""
