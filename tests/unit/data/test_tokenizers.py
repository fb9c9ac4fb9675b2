"""Tokenizers of each format: against the package of the format, saved, prepared, refused."""

import base64
import hashlib
import importlib
import json

import pytest
import tokenizers

from pipemega.data.tokens.prepare import PrepareOptions, prepare, read_manifest, tokenizer_of
from pipemega.data.tokens.token_files import IndexedDataset
from pipemega.data.tokens.tokenizers import EOD, FastTokenizer, TiktokenTokenizer, load_tokenizer
from pipemega.errors import DataError
from tests.unit.data.tokenizer_files import bpe_files, sentencepiece_model

TEXT = f"to be, über\n  or not {EOD} to 日本"


@pytest.fixture
def cl100k(tmp_path, monkeypatch):
    """The files of an encoding in tiktoken's cache, with the first 256 tokens."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    public = importlib.import_module("tiktoken_ext.openai_public")
    ranks = b"".join(base64.b64encode(bytes([byte])) + f" {byte}\n".encode() for byte in range(256))
    url = "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken"
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / hashlib.sha1(url.encode()).hexdigest()).write_bytes(ranks)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    # The published file has another hash than that of this test.
    load = importlib.import_module("tiktoken.load")
    monkeypatch.setattr(load, "check_hash", lambda *_: True)
    tiktoken.registry.ENCODINGS.clear()
    yield public
    tiktoken.registry.ENCODINGS.clear()


def test_gpt2_files_give_the_ids_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = bpe_files(tmp_path)
    (folder / "tokenizer.json").unlink()
    vocabulary, merges = (str(folder / name) for name in ("vocab.json", "merges.txt"))
    theirs = transformers.GPT2Tokenizer(vocab=vocabulary, merges=merges)
    for name in (folder, folder / "vocab.json", folder / "merges.txt"):
        ours = load_tokenizer(name)
        assert ours.encode("to be, über\n  or not") == theirs.encode("to be, über\n  or not")
        assert ours.encode_example(TEXT) == theirs.encode(TEXT)
        assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, 0)
        assert ours.decode(ours.encode(TEXT)) == TEXT


def test_a_vocabulary_and_its_merges_may_have_other_names(tmp_path):
    folder = bpe_files(tmp_path)
    expected = load_tokenizer(folder / "vocab.json").digest()
    (folder / "vocab.json").rename(folder / "gpt2-vocab.json")
    with pytest.raises(
        DataError, match=r"gpt2-merges.txt does not exist: .* VOCAB.json,MERGES.txt"
    ):
        load_tokenizer(folder / "gpt2-vocab.json")
    both = f"{folder}/gpt2-vocab.json, {folder}/merges.txt"
    assert load_tokenizer(both).digest() == expected
    (folder / "merges.txt").rename(folder / "gpt2-merges.txt")
    with pytest.raises(DataError, match=r"/merges.txt does not exist"):
        load_tokenizer(both)
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        assert load_tokenizer(folder / name).digest() == expected
    own = load_tokenizer(folder / "tokenizer.json").digest()
    (folder / "tokenizer.json").rename(folder / "my-vocab.json")
    assert load_tokenizer(folder / "my-vocab.json").digest() == own


def test_a_vocabulary_of_megatrons_tiktokenizer_is_refused_with_the_way_out(tmp_path):
    path = tmp_path / "multi.vocab.json"
    path.write_text(json.dumps([{"rank": 0, "token_bytes": "AA==", "token_str": "x"}]))
    with pytest.raises(
        DataError, match=r"TikTokenizer, .* set model.vocab_size .* data.eod_id \(2"
    ):
        load_tokenizer(path)


def test_sentencepiece_gives_the_ids_of_its_own_package(tmp_path):
    path = sentencepiece_model(tmp_path)
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for name in (path, tmp_path):
        ours = load_tokenizer(name)
        assert ours.encode("to be or not") == theirs.encode("to be or not")
        assert ours.decode(ours.encode("to be or not")) == "to be or not"
        assert [ids.tolist() for ids in ours.encode_batch(["to", "be"])] == [
            theirs.encode("to"), theirs.encode("be")
        ]  # fmt: skip
        assert (ours.vocab_size, ours.eod) == (60, 2)
        assert (ours.id_of("</s>"), ours.id_of("nothing")) == (2, None)


def test_tiktoken_gives_the_ids_of_its_own_package(cl100k):
    import tiktoken

    ours, theirs = load_tokenizer("tiktoken:cl100k_base"), tiktoken.get_encoding("cl100k_base")
    assert ours.encode(TEXT) == theirs.encode(TEXT, disallowed_special=())
    assert ours.encode_example(TEXT) == theirs.encode(TEXT, allowed_special="all")
    assert ours.decode(ours.encode_example(TEXT)) == TEXT
    assert ours.eod == theirs.eot_token
    assert ours.vocab_size == theirs.n_vocab
    assert ours.decode([300, 65]) == "A"
    assert (ours.id_of(EOD), ours.id_of("nothing")) == (theirs.eot_token, None)


def test_a_tiktoken_encoding_is_not_downloaded(tmp_path, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    requests = importlib.import_module("requests")
    monkeypatch.setattr(requests, "get", lambda *_: pytest.fail("a download"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    tiktoken.registry.ENCODINGS.clear()
    with pytest.raises(DataError, match=r"'p50k_base' on this .* set TIKTOKEN_CACHE_DIR to the"):
        load_tokenizer("tiktoken:p50k_base")
    with pytest.raises(DataError, match=r"no encoding 'p51k'; it has cl100k_base, gpt2"):
        load_tokenizer("tiktoken:p51k")


def test_each_kind_is_saved_and_loaded_beside_prepared_tokens(tmp_path, cl100k):
    (tmp_path / "text.txt").write_text("to be or not to be", encoding="utf-8")
    names = [
        str(bpe_files(tmp_path / "bpe") / "vocab.json"),
        str(sentencepiece_model(tmp_path / "sp")),
        "tiktoken:cl100k_base",
    ]
    for number, name in enumerate(names):
        prefix = tmp_path / f"out{number}"
        prepare(tmp_path / "text.txt", prefix, PrepareOptions(tokenizer=name))
        given, saved = load_tokenizer(name), load_tokenizer(tokenizer_of(prefix))
        assert type(saved) is type(given)
        assert saved.digest() == given.digest()
        expected = [*saved.encode("to be or not to be"), given.eod]
        assert IndexedDataset(prefix).get(0).tolist() == expected
        again = prepare(tmp_path / "text.txt", prefix, PrepareOptions(tokenizer=name))
        assert again == read_manifest(prefix)


def test_the_end_of_a_document_is_the_given_token_or_the_one_that_the_folder_names(tmp_path):
    folder = bpe_files(tmp_path, eos_token={"content": "es"})
    # Instruction-tuned Qwen models have <|endoftext|> and stop at <|im_end|>.
    assert load_tokenizer(folder).id_of(EOD) == 0
    assert load_tokenizer(folder).eod == load_tokenizer(folder).id_of("es") is not None
    text = (folder / "tokenizer.json").read_text(encoding="utf-8").replace(EOD, "<end>")
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    assert load_tokenizer(folder, 7).eod == 7
    assert load_tokenizer(folder, "<end>").eod == 0
    (folder / "text.txt").write_text("to be", encoding="utf-8")
    options = PrepareOptions(tokenizer=str(folder), eod="<end>")
    assert prepare(folder / "text.txt", folder / "out", options).eod == 0
    assert IndexedDataset(folder / "out").get(0)[-1] == 0
    for wrong in (300, "<none>"):
        with pytest.raises(DataError, match=rf"data.eod_id is {wrong!r}, .* ids are 0 to 288"):
            load_tokenizer(folder, wrong)


def test_folders_and_files_without_a_tokenizer_are_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "model.safetensors").touch()
    with pytest.raises(DataError, match=r"none of tokenizer.json, .*, but model.safetensors"):
        load_tokenizer(tmp_path / "empty")
    folder = bpe_files(tmp_path / "bpe")
    (folder / "merges.txt").unlink()
    with pytest.raises(DataError, match=r"merges.txt does not exist: a BPE needs vocab.json and"):
        load_tokenizer(folder / "vocab.json")
    (folder / "merges.txt").write_text("no merges at all\n")
    with pytest.raises(DataError, match=r"are not the vocabulary and the merges of a BPE"):
        load_tokenizer(folder / "vocab.json")
    pytest.importorskip("sentencepiece", reason="SentencePiece is not installed")
    (tmp_path / "x.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(DataError, match=r"x.model is not a SentencePiece model; if it is a list"):
        load_tokenizer(tmp_path / "x.model")
    (tmp_path / "x.json").write_text('{"type": "sentencepiece", "model": "a"}')
    with pytest.raises(DataError, match=r"x.json is (damaged|not a SentencePiece)"):
        load_tokenizer(tmp_path / "x.json")


def test_truncation_and_padding_stored_in_a_tokenizer_json_are_not_used(tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(bpe_files(tmp_path) / "tokenizer.json"))
    wanted = [list(load_tokenizer(tmp_path).encode(text)) for text in ("to", "to be " * 9)]
    inner.enable_truncation(4)
    inner.enable_padding()
    inner.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert [ids.tolist() for ids in ours.encode_batch(["to", "to be " * 9])] == wanted
    assert ours.encode_examples(["to", "to be " * 9]) == wanted


def test_special_tokens_in_an_example_are_recognised():
    tokenizer = FastTokenizer.train(["to be"] * 9, 260)
    assert tokenizer.encode_example(f"to{EOD}") == [*tokenizer.encode("to"), tokenizer.eod]
    assert tokenizer.eod not in tokenizer.encode(f"to{EOD}")


def test_a_saved_tiktoken_tokenizer_equals_the_original(cl100k, tmp_path):
    ours = load_tokenizer("tiktoken:cl100k_base")
    assert isinstance(ours, TiktokenTokenizer)
    (tmp_path / "t.json").write_text(ours.to_json())
    saved = load_tokenizer(tmp_path / "t.json")
    assert saved.encode_example(TEXT) == ours.encode_example(TEXT)
    assert (saved.vocab_size, saved.eod) == (ours.vocab_size, ours.eod)
