"""The datasets of a run, from the data section; the mock; the bigram model."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from pipemega.config import load
from pipemega.data.loader import BatchLoader
from pipemega.data.sample_reader import Share
from pipemega.data.tokens import generated_data as bigram_module
from pipemega.data.tokens.blending import BlendedDataset
from pipemega.data.tokens.build_datasets import DataRequest, build_datasets
from pipemega.data.tokens.data_files import errors_of_eod, known_vocabulary
from pipemega.data.tokens.generated_data import MockDataset, bigram_loss
from pipemega.data.tokens.gpt_dataset import GPTDataset
from pipemega.data.tokens.prepare import PrepareOptions, prepare, tokenizer_of
from pipemega.data.tokens.token_files import IndexedDataset, IndexedWriter
from pipemega.data.tokens.tokenizers import FastTokenizer, load_tokenizer
from pipemega.errors import ConfigError, DataError
from tests.unit.data.tokenizer_files import bpe_files, sentencepiece_model

BATCH = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
TEXTS = [f"def function_{i}(x):\n    return x + {i * i}\n" * 3 for i in range(40)]


def section(tmp_path, **keys):
    defaults = {"split": "80,10,10", "vocab_size": 300, "cache_path": str(tmp_path / "cache")}
    return load({"data": defaults | keys, **BATCH}).data


def build(data, train=20, valid=5, test=0, vocab_size="auto", **options):
    request = DataRequest(16, 7, train, valid, test, vocab_size)
    return build_datasets(data, request, **options)


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "texts"
    source.mkdir()
    for i, text in enumerate(TEXTS):
        (source / f"{i:02}.txt").write_text(text)
    return source


@pytest.fixture
def prefixes(folder, tmp_path):
    prepare(folder, tmp_path / "a", PrepareOptions(vocab_size=300))
    prepare(
        f"{folder}/*5.txt", tmp_path / "b", PrepareOptions(tokenizer=tokenizer_of(tmp_path / "a"))
    )
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_a_corpus_is_prepared_into_the_cache_once_and_read(folder, tmp_path):
    said = []
    first = build(section(tmp_path, corpus=str(folder)), say=said.append)
    assert [line.split()[0] for line in said] == ["training", "prepared"]
    again = build(section(tmp_path, corpus=[str(folder)]), say=said.append)
    assert len(said) == 2
    assert first.vocab_size == again.vocab_size == 300
    assert first.tokenizer.decode(first.train[0][0].tolist())
    assert first.test is None
    assert first.fingerprint == again.fingerprint != ""
    assert first.description[0].startswith(f"corpus {folder}: 40 documents, ")
    assert [line.split(":")[0] for line in first.description[1:]] == ["train", "valid"]
    assert "20 requested = 0." in first.description[1]
    assert not list(tmp_path.rglob("*.lock"))
    build(section(tmp_path, corpus=str(folder), vocab_size=290), say=said.append)
    assert len(said) == 4


def test_the_tokenizer_next_to_the_token_files_is_used(prefixes, tmp_path):
    datasets = build(section(tmp_path, data_path=prefixes[0]), test=2)
    assert isinstance(datasets.train, GPTDataset)
    assert datasets.vocab_size == datasets.tokenizer.vocab_size == 300
    assert [len(d.sequences) for d in (datasets.train, datasets.valid, datasets.test)] == [32, 4, 4]
    assert len(datasets.train) >= 20


def test_without_a_number_of_samples_a_split_is_one_epoch(prefixes, tmp_path):
    datasets = build(section(tmp_path, data_path=prefixes[0]), train=None, valid=None)
    tokens = datasets.train.tokens_per_epoch
    assert len(datasets.train) == (tokens - 1) // 16
    assert len(datasets.train.split_tokens()) == tokens


def test_prefixes_are_blended_with_weights_and_without(prefixes, tmp_path):
    weighted = build(section(tmp_path, data_path=[0.75, prefixes[0], 0.25, prefixes[1]]))
    assert isinstance(weighted.train, BlendedDataset)
    assert len(weighted.train) == 20
    assert np.bincount(weighted.train._dataset_index).tolist() == [15, 5]
    assert "20 samples blended from 0.7500" in weighted.description[2]
    plain = build(section(tmp_path, data_path=list(prefixes)), train=None, valid=0)
    assert len(plain.train) == sum(len(part) for part in plain.train.datasets)
    assert plain.valid is None
    assert plain.bigram() is None
    with pytest.raises(ConfigError, match=r"set training.train_steps in place of training.epochs"):
        build(section(tmp_path, data_path=[1, prefixes[0]]), train=None)


def test_a_blend_index_is_stored_next_to_the_data_without_a_cache_path(prefixes, tmp_path):
    build(section(tmp_path, data_path=list(prefixes), cache_path=None))
    names = [path.name for path in (tmp_path / "cache" / "GPTDataset_indices").iterdir()]
    assert sum("BlendedDataset-train" in name for name in names) == 3


def test_masks_and_positions_reach_the_samples(prefixes, tmp_path):
    datasets = build(
        section(tmp_path, data_path=prefixes[0], eod_mask_loss=True, reset_position_ids=True)
    )
    seen = 0
    for i in range(20):
        (tokens, positions), labels = datasets.train[i]
        ends = (tokens == 0).nonzero().flatten().tolist()
        seen += len(ends)
        assert (labels[ends] == -100).all()
        assert (positions[[end + 1 for end in ends if end < 15]] == 0).all()
    assert seen


def test_a_file_name_is_accepted_instead_of_the_prefix(prefixes, tmp_path):
    named = build(section(tmp_path, data_path=[f"{prefixes[0]}.bin", f"{prefixes[1]}.idx"]))
    assert [str(part.data.prefix) for part in named.train.datasets] == list(prefixes)


def test_megatrons_text_gives_the_blend_of_the_list(prefixes, tmp_path):
    a, b = prefixes
    expected = build(section(tmp_path, data_path=[0.75, a, 0.25, b]))
    for given in (f"0.75 {a} 0.25 {b}", ["0.75", a, "0.25", b]):
        assert build(section(tmp_path, data_path=given)).fingerprint == expected.fingerprint
    for given in (f"{a} {b}", [a, b]):
        assert len(build(section(tmp_path, data_path=given), train=None).train.datasets) == 2


def test_each_split_may_have_its_own_files(prefixes, tmp_path):
    a, b = prefixes
    keys = {
        "train_data_path": f"0.75 {a} 0.25 {b}",
        "valid_data_path": ["1", b],
        "split": "969,30,1",
    }
    datasets = build(section(tmp_path, **keys), test=3)
    whole = IndexedDataset(b)
    assert [part.sequences for part in datasets.train.datasets] == [range(40), range(len(whole))]
    # The only files of a split are no blend, as in Megatron.
    assert datasets.valid.sequences == range(len(whole))
    assert (datasets.valid.name, datasets.test) == ("valid", None)
    assert datasets.tokenizer.vocab_size == 300
    # Weights have no end; files without weights are read once.
    assert len(build(section(tmp_path, **keys), valid=None).valid) > 0
    with pytest.raises(ConfigError, match=r"data.train_data_path has weights, so the number of tr"):
        build(section(tmp_path, **keys), train=None)


def test_a_split_may_have_parts_of_files(prefixes, tmp_path):
    a, b = prefixes
    keys = {"train_data_path": f"T: 1 0:0.9 {a}, 3 0.5:1 {b}", "valid_data_path": f"1 0.9:1 {a}"}
    datasets = build(section(tmp_path, **keys, split="969,30,1"), train=40)
    half = len(IndexedDataset(b))
    parts = [part.sequences for part in datasets.train.datasets]
    assert parts == [range(36), range(round(half / 2), half)]
    assert datasets.valid.sequences == range(36, 40)
    assert datasets.train.weights.tolist() == [0.25, 0.75]
    keys["valid_data_path"] = f"1 0:0.001 {a}"
    with pytest.raises(DataError, match=r"data.valid_data_path leaves no document of .*for valid"):
        build(section(tmp_path, **keys, split="969,30,1"))


def test_a_split_without_a_share_has_no_dataset(prefixes, tmp_path):
    assert build(section(tmp_path, data_path=prefixes[0], split="1")).valid is None
    with pytest.raises(ConfigError, match=r"data.split is '0,1', which leaves no training data"):
        build(section(tmp_path, data_path=prefixes[0], split="0,1"))


def test_a_config_without_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"names no data: set data.corpus .*python-stdlib"):
        build(section(tmp_path))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(prefixes, tmp_path):
    data = section(tmp_path, data_path=prefixes[0])
    with pytest.raises(DataError, match=r"model.vocab_size is 256, but the tokenizer .* has 300"):
        build(data, vocab_size=256)
    assert build(data, vocab_size=320).vocab_size == 320


def test_token_files_without_a_tokenizer_need_a_vocabulary_size(tmp_path):
    with IndexedWriter(tmp_path / "foreign", "int32") as writer:
        for _ in range(10):
            writer.add_document(np.arange(90))
    data = section(tmp_path, data_path=str(tmp_path / "foreign"))
    with pytest.raises(
        DataError, match=r"model.vocab_size is 'auto', but .*foreign has no tokenizer"
    ):
        build(data)
    datasets = build(data, vocab_size=90)
    assert datasets.tokenizer is None
    assert datasets.vocab_size == 90
    with pytest.raises(DataError, match=r"data.eod_mask_loss needs .* set data.tokenizer"):
        build(section(tmp_path, data_path=str(tmp_path / "foreign"), eod_mask_loss=True),
              vocab_size=90)  # fmt: skip


def test_the_end_of_documents_is_known_by_its_id_without_a_tokenizer(tmp_path):
    with IndexedWriter(tmp_path / "foreign", "int32") as writer:
        for length in range(5, 25):
            writer.add_document(np.arange(1, length) % 9)
    keys = {"data_path": str(tmp_path / "foreign"), "eod_mask_loss": True}
    datasets = build(section(tmp_path, **keys, reset_position_ids=True, eod_id=0), vocab_size=9)
    (tokens, positions), labels = datasets.train[0]
    ends = tokens == 0
    assert ends.any()
    assert torch.equal(labels == -100, ends)
    after = torch.cat([torch.tensor([False]), ends[:-1]])
    assert (positions[after] == 0).all()
    with pytest.raises(
        DataError, match=r"data.eod_id is 9, which is outside of the vocabulary of 9"
    ):
        build(section(tmp_path, **keys, eod_id=9), vocab_size=9)
    with pytest.raises(
        DataError, match=r"is the text '<eod>', but .*foreign has no tokenizer .* id,"
    ):
        build(section(tmp_path, **keys, eod_id="<eod>"), vocab_size=9)


def test_a_check_finds_an_unknown_or_impossible_end_of_documents(prefixes, tmp_path):
    """These are errors before the run starts."""
    with IndexedWriter(tmp_path / "foreign", "int32") as writer:
        writer.add_document(np.arange(9))
    foreign = {"data_path": str(tmp_path / "foreign"), "reset_position_ids": True}

    def errors(**keys):
        return list(errors_of_eod(section(tmp_path, **keys), 9))

    (error,) = errors(**foreign)
    assert "data.reset_position_ids needs the end-of-document id" in error
    assert "set data.tokenizer, or data.eod_id to the id" in error
    (error,) = errors(**foreign, eod_id=9)
    assert error == "data.eod_id is 9, which is outside of the vocabulary of 9 tokens"
    assert errors(**foreign, eod_id=8) == []
    # The tokenizer beside the files tells it; missing files are reported by another check.
    assert errors(data_path=prefixes[0], eod_mask_loss=True) == []
    assert errors(data_path="none", eod_mask_loss=True) == []


@pytest.mark.parametrize("kind", ["vocab.json", "gpt2-vocab.json", "both", "tokenizer.model"])
def test_token_files_of_megatron_are_read_with_the_named_tokenizer(tmp_path, kind):
    """Such files have no manifest and no tokenizer beside them."""
    folder = tmp_path / "tokenizer"
    if kind == "tokenizer.model":
        name = str(sentencepiece_model(folder))
    else:
        bpe_files(folder)
        vocabulary, merges = {"both": ("words.json", "pairs.bpe")}.get(
            kind, (kind, kind.replace("vocab.json", "merges.txt"))
        )
        (folder / "vocab.json").rename(folder / vocabulary)
        (folder / "merges.txt").rename(folder / merges)
        name = (
            f"{folder / vocabulary},{folder / merges}"
            if kind == "both"
            else f"{folder / vocabulary}"
        )
    tokenizer = load_tokenizer(name)
    with IndexedWriter(tmp_path / "foreign", "int32") as writer:
        for text in TEXTS:
            writer.add_document(np.array([*tokenizer.encode(text), tokenizer.eod]))
    keys = {"data_path": str(tmp_path / "foreign"), "tokenizer": name, "eod_mask_loss": True}
    datasets = build(section(tmp_path, **keys))
    assert (datasets.vocab_size, datasets.tokenizer.eod) == (tokenizer.vocab_size, tokenizer.eod)
    assert datasets.train.format.eod == tokenizer.eod
    assert known_vocabulary(section(tmp_path, **keys)).size == tokenizer.vocab_size


def test_data_of_another_tokenizer_is_refused(prefixes, folder, tmp_path):
    (tmp_path / "other.json").write_text(FastTokenizer.train(TEXTS, 280).to_json())
    with pytest.raises(DataError, match=r"/a was not made with the tokenizer .*other.json"):
        build(section(tmp_path, data_path=prefixes[0], tokenizer=str(tmp_path / "other.json")))
    prepare(folder, tmp_path / "c", PrepareOptions(vocab_size=270))
    with pytest.raises(DataError, match=r"/c was not made with the tokenizer .*a.tokenizer.json"):
        build(section(tmp_path, data_path=[prefixes[0], str(tmp_path / "c")]))


def test_the_named_tokenizer_encodes_the_corpus(folder, tmp_path):
    (tmp_path / "mine.json").write_text(FastTokenizer.train(TEXTS, 280).to_json())
    data = section(tmp_path, corpus=str(folder), tokenizer=str(tmp_path / "mine.json"))
    assert build(data).vocab_size == 280


def test_mock_samples_need_no_files_and_can_be_learned(tmp_path):
    datasets = build(section(tmp_path, mock=True), train=None, test=3)
    assert isinstance(datasets.train, MockDataset)
    assert (len(datasets.train), len(datasets.valid), len(datasets.test)) == (1024, 5, 3)
    tokens, labels = datasets.train[3]
    assert tokens[1:].tolist() == labels[:-1].tolist()
    strides = (labels - tokens) % 300
    assert len(set(strides.tolist())) == 1
    assert datasets.train[3][0].tolist() == tokens.tolist() != datasets.valid[3][0].tolist()
    assert datasets.vocab_size == 300
    assert datasets.description[0] == "train: 1,024 mock samples of 16 tokens"
    assert build(section(tmp_path, mock=True), vocab_size=50).vocab_size == 50
    with pytest.raises(IndexError, match="sample 5 of 5"):
        datasets.valid[5]
    with pytest.raises(DataError, match=r"data.eod_mask_loss needs the end-of-document id"):
        build(section(tmp_path, mock=True, eod_mask_loss=True))


def test_mock_samples_have_no_documents_to_count_positions_in(tmp_path):
    with pytest.raises(DataError, match=r"data.reset_position_ids needs the end-of-document id"):
        build(section(tmp_path, mock=True, reset_position_ids=True))


def test_a_run_reads_its_batches_from_its_datasets(prefixes, tmp_path):
    datasets = build(section(tmp_path, data_path=prefixes[0]))
    loader = BatchLoader(datasets.train, Share(4, 2))
    (tokens, labels), _ = loader.next_step()
    assert tokens.shape == labels.shape == (2, 16)
    assert tokens[1].tolist() == datasets.train[1][0].tolist()
    assert loader.state_dict()["fingerprint"] == datasets.fingerprint
    loader.close()


# --- the bigram model


def plain_bigram(train, valid, vocab_size, strength, weight):
    """The formula of the file's head, pair by pair."""
    single = [train.count(b) for b in range(vocab_size)]
    total = 0.0
    for a, b in pairwise(valid):
        pairs = sum(x == a and y == b for x, y in pairwise(train))
        first = sum(x == a for x in train[:-1])
        common = (single[b] + 1) / (len(train) + vocab_size)
        chance = weight * (pairs + strength * common) / (first + strength) + (1 - weight) * common
        total -= math.log(chance)
    return total / (len(valid) - 1)


def test_the_bigram_loss_equals_the_formula(monkeypatch):
    random = np.random.RandomState(0)
    train, valid = random.randint(0, 9, 400), random.randint(0, 9, 60)
    result = bigram_loss(train, valid, 10)
    assert result.loss == pytest.approx(
        plain_bigram(train.tolist(), valid.tolist(), 10, *result.smoothing), abs=1e-12
    )
    assert result.tokens == 59
    monkeypatch.setattr(bigram_module, "PORTION", 7)
    assert bigram_loss(train, valid, 10) == result


def test_probabilities_of_all_successors_sum_to_one():
    train = np.random.RandomState(0).randint(0, 6, 50)
    for smoothing in (bigram_module.Smoothing(1.0, 0.5), bigram_module.Smoothing(30.0, 1.0)):
        counts = bigram_module.BigramCounts(train, 7)
        for a in range(7):
            losses = [counts.losses(np.array([a, b]), [smoothing])[1][0] for b in range(7)]
            assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1)


def test_the_bigram_model_learns_only_pairs():
    ring = np.arange(5000) % 10
    assert bigram_loss(ring, ring[:500], 10).loss < 0.01
    noise = np.random.RandomState(0).randint(0, 10, 20_000).astype(np.uint16)
    result = bigram_loss(noise[:19_000], noise[19_000:], 10)
    assert result.loss == pytest.approx(math.log(10), abs=0.01)
    assert result.loss == pytest.approx(result.unigram_loss, abs=0.01)


def test_the_smoothing_is_chosen_without_the_validation_tokens():
    train = np.random.RandomState(0).randint(0, 50, 3000)
    one, two = (bigram_loss(train, np.full(20, token), 50) for token in (1, 2))
    assert one.smoothing == two.smoothing


@pytest.mark.parametrize(
    ("train", "valid", "message"),
    [
        ([1] * 9, [1, 2], "9 training and 2 validation tokens are too few"),
        ([1] * 99, [1], "99 training and 1 validation tokens are too few"),
        ([1] * 98 + [7] * 2, [1, 2, 3], "token ids from 1 to 7 do not fit the vocabulary of 5"),
    ],
)
def test_a_bigram_model_needs_tokens(train, valid, message):
    with pytest.raises(DataError, match=message):
        bigram_loss(np.array(train), np.array(valid), 5)


def test_the_datasets_of_a_run_return_their_bigram_loss(prefixes, tmp_path):
    datasets = build(section(tmp_path, data_path=prefixes[0]))
    result = datasets.bigram()
    assert 0 < result.loss < result.unigram_loss < math.log(300)
    assert result.tokens == datasets.valid.tokens_per_epoch - 1
