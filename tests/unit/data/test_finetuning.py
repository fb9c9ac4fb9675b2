"""Fine-tuning data: records, instructions, packing, padding, truncation, caches."""

import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipemega.config import load
from pipemega.data.finetuning import finetuning_dataset as build_module
from pipemega.data.finetuning import finetuning_dataset as example_cache
from pipemega.data.finetuning.examples import InstructionFormat, TextFormat
from pipemega.data.finetuning.finetuning_dataset import cut, finetuning_dataset, pack
from pipemega.data.finetuning.record_files import Record, find_records
from pipemega.data.loader import BatchLoader, LoaderOptions
from pipemega.data.sample_reader import Share
from pipemega.data.tokens.build_datasets import DataRequest, build_datasets
from pipemega.data.tokens.data_files import check_data_inputs
from pipemega.data.tokens.tokenizers import load_tokenizer
from pipemega.errors import ConfigError, DataError
from tests.unit.data.tokenizer_files import bpe_files, sentencepiece_model

TEXTS = [f"to be {'or not ' * (i % 7)}that is question {i}" for i in range(23)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return bpe_files(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def keys(folder, tmp_path):
    return {"tokenizer": str(folder), "cache_path": str(tmp_path / "cache")}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def documents(inputs, labels):
    """Return (inputs, labels) of each document of a packed sample, without the padding."""
    starts = np.flatnonzero(inputs["position_ids"].numpy() == 0).tolist()
    bounds = pairwise([*starts, len(labels)])
    parts = [(inputs["input_ids"][a:b].tolist(), labels[a:b].tolist()) for a, b in bounds]
    return [part for part in parts if any(label != -100 for label in part[1])]


# --- packing and padding


def test_packed_samples_contain_each_example_once_with_restarting_positions(keys):
    records = [{"text": text} for text in TEXTS]
    data = finetuning_dataset(records, {"format": "text", **keys}, seq_length=64)
    tokenizer = load_tokenizer(keys["tokenizer"])
    found = []
    for inputs, labels in data:
        assert inputs.keys() == {"input_ids", "position_ids"}
        assert {len(x) for x in (*inputs.values(), labels)} == {64}
        found += documents(inputs, labels)
    expected = [[*tokenizer.encode(text), tokenizer.eod] for text in TEXTS]
    assert sorted(found) == sorted((ids[:-1], ids[1:]) for ids in expected)
    assert len(data) == len(pack(np.array([len(ids) - 1 for ids in expected]), 64)[1]) - 1


@pytest.mark.parametrize("seed", range(5))
def test_bins_are_not_overfull_and_hold_each_item_once(seed):
    random = np.random.RandomState(seed)
    lengths = random.randint(1, 33, size=500)
    items, bins = pack(lengths, 32)
    assert sorted(items.tolist()) == list(range(500))
    loads = [lengths[items[a:b]].sum() for a, b in pairwise(bins.tolist())]
    assert max(loads) <= 32
    # Two bins that would fit into one were not left apart.
    smallest, second = sorted(loads)[:2]
    assert smallest + second > 32
    assert sum(loads) / (32 * len(loads)) > 0.97


def test_padded_samples_have_a_mask_and_one_example(keys):
    section = {"format": "text", "packing": False, **keys}
    data = finetuning_dataset([{"text": text} for text in TEXTS], section, seq_length=64)
    tokenizer = load_tokenizer(keys["tokenizer"])
    assert len(data) == len(TEXTS)
    assert data.collate_fn is None
    for text, (inputs, labels) in zip(TEXTS, data, strict=True):
        ids = [*tokenizer.encode(text), tokenizer.eod]
        size = len(ids) - 1
        assert inputs["input_ids"].tolist() == ids[:-1] + [tokenizer.eod] * (64 - size)
        assert inputs["attention_mask"].tolist() == [1] * size + [0] * (64 - size)
        assert labels.tolist() == ids[1:] + [-100] * (64 - size)


def test_micro_batches_are_padded_to_a_multiple_of_a_number(keys):
    section = {"format": "text", "packing": False, "pad_to_multiple_of": 8, **keys}
    data = finetuning_dataset([{"text": text} for text in TEXTS], section, seq_length=64)
    lengths = [len(labels) for _, labels in data]
    assert len(set(lengths)) > 3
    loader = BatchLoader(data, Share(4, 2), LoaderOptions(shuffle=False))
    assert loader._source.reads_ahead  # it draws nothing
    for start, (inputs, labels) in zip(range(0, 20, 2), loader, strict=False):
        expected = -(-max(lengths[start : start + 2]) // 8) * 8
        assert labels.shape == inputs["input_ids"].shape == (2, expected)
        assert inputs["attention_mask"].sum(1).tolist() == lengths[start : start + 2]
    loader.close()
    with pytest.raises(DataError, match=r"pad_to_multiple_of \(48\) must divide .* \(64\)"):
        finetuning_dataset([{"text": "to"}], {**section, "pad_to_multiple_of": 48}, seq_length=64)


# --- truncation


def test_longer_examples_are_cut_split_or_left_out():
    bounds = np.array([[0, 5], [5, 15], [15, 17]])
    is_answer = np.zeros(17, dtype=bool)
    is_answer[[2, 12, 14, 16]] = True
    kept = cut(bounds, is_answer, 4, "truncate")
    assert kept.bounds.tolist() == [[0, 5], [15, 17]]  # 5..9 has no label that counts
    assert (kept.labels.tolist(), kept.too_long, kept.without_loss) == ([1, 1], 1, 1)
    kept = cut(bounds, is_answer, 4, "drop")
    assert (kept.bounds.tolist(), kept.too_long) == ([[0, 5], [15, 17]], 1)
    kept = cut(bounds, is_answer, 4, "split")
    # Pieces overlap by one token: each label is in one of them.
    assert kept.bounds.tolist() == [[0, 5], [9, 14], [13, 15], [15, 17]]
    assert kept.labels.sum() == is_answer.sum()
    assert kept.without_loss == 1


def test_each_token_of_a_split_text_is_a_label_once(keys):
    text = " ".join(TEXTS)
    data = finetuning_dataset([{"text": text}], {"format": "text", **keys}, seq_length=32)
    tokenizer = load_tokenizer(keys["tokenizer"])
    ids = [*tokenizer.encode(text), tokenizer.eod]
    labels = [label for x in data for part in documents(*x) for label in part[1] if label >= 0]
    assert sorted(labels) == sorted(ids[1:])
    assert "1 longer ones split" in data.describe()


def test_examples_without_an_answer_within_the_length_are_counted_or_an_error(keys):
    section = {"format": "instruction", **keys}
    records = [{"prompt": "to be " * 40, "response": "or"}, {"prompt": "to", "response": " be"}]
    data = finetuning_dataset(records, section, seq_length=16)
    assert len(data) == 1
    line = data.describe()
    assert "1 longer ones cut off; 1 without an answer in their first 16 tokens" in line
    with pytest.raises(DataError, match=r"none of the 1 examples for train has an answer within"):
        finetuning_dataset(records[:1], section, seq_length=16)


# --- instructions and texts


@pytest.mark.parametrize(
    ("record", "prompt", "answer"),
    [
        ({"prompt": "to be", "response": " or not"}, "to be", " or not"),
        ({"prompt": "to be", "completion": " or not"}, "to be", " or not"),
        ({"instruction": "to be", "input": "", "output": "or"}, "Instruction:\nto be\n\n###", "or"),
        ({"instruction": "to be", "input": "not", "output": "or"}, "Input:\nnot\n\n###", "or"),
    ],
)
def test_the_loss_counts_the_response_and_its_end(record, prompt, answer, folder):
    tokenizer = load_tokenizer(folder)
    (example,) = InstructionFormat(tokenizer, None, None).examples([Record(record, "here", 1)])
    tokens, mask = example.tokens, example.is_answer
    assert tokenizer.decode(tokens[mask]) == answer + "<|endoftext|>"
    assert prompt in tokenizer.decode(tokens[~mask])
    assert "or" not in tokenizer.decode(tokens[~mask]).split("###")[-1].split()


def test_a_prompt_template_takes_keys_of_the_record(folder):
    tokenizer = load_tokenizer(folder)
    form = InstructionFormat(tokenizer, "Q: {question} {{A}}:", "reply")
    (example,) = form.examples([Record({"question": "to be?", "reply": " no"}, "here", 1)])
    assert tokenizer.decode(example.tokens) == "Q: to be? {A}: no<|endoftext|>"
    assert tokenizer.decode(example.tokens[example.is_answer]) == " no<|endoftext|>"


def test_special_tokens_of_a_template_are_tokens_and_the_first_is_not_doubled(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = bpe_files(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    start = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": start},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    (plain,) = TextFormat(tokenizer, None).examples([Record({"text": "to be"}, "here", 1)])
    assert plain.tokens.tolist() == [*theirs.encode("to be"), 0]
    form = InstructionFormat(tokenizer, "<|endoftext|>{q}", "a")
    (example,) = form.examples([Record({"q": "to", "a": " be<|endoftext|>"}, "here", 1)])
    assert example.tokens.tolist() == [0, *tokenizer.encode("to be"), 0]
    # Equal words at the start of a text are kept.
    (twice,) = TextFormat(tokenizer, None).examples([Record({"text": "  to"}, "here", 1)])
    assert tokenizer.decode(twice.tokens) == "<|endoftext|>  to<|endoftext|>"


def test_instructions_with_sentencepiece(tmp_path):
    tokenizer = load_tokenizer(sentencepiece_model(tmp_path))
    (example,) = InstructionFormat(tokenizer, None, None).examples(
        [Record({"prompt": "to be", "response": " or not"}, "here", 1)]
    )
    assert tokenizer.decode(example.tokens[example.is_answer][:-1]) == "or not"
    assert example.tokens[-1] == tokenizer.eod == 2


def test_empty_responses_and_texts_are_left_out_and_counted(keys):
    records = [{"prompt": "a", "response": ""}, {"prompt": "a", "response": "b"}]
    data = finetuning_dataset(records, {"format": "instruction", **keys}, seq_length=8)
    assert data._num_examples == 1
    with pytest.raises(DataError, match=r"none of the 1 records of list has an answer"):
        finetuning_dataset(records[:1], {"format": "instruction", **keys}, seq_length=8)
    with pytest.raises(DataError, match=r"list has no records"):
        finetuning_dataset([], {"format": "instruction", **keys}, seq_length=8)


@pytest.mark.parametrize(
    ("format_keys", "record", "message"),
    [
        ({"format": "text"}, {"body": "a"}, r"record 0 of list has no key 'text'; its keys are 'b"),
        ({"format": "text"}, {"text": 3}, r"record 0 of list: 'text' must be text, not int"),
        ({"format": "text"}, "a", r"the records"),
        ({"format": "instruction"}, {"prompt": "a"}, r"has no key 'response' or 'completion' or"),
        ({"format": "instruction"}, {"response": "a"}, r"has no key 'prompt' or 'instruction'"),
        (
            {"format": "instruction"},
            {"prompt": [{"role": "user"}], "response": "a"},
            r"'prompt' must be text, not list; for messages set data.format to 'chat'",
        ),
        (
            {"format": "instruction", "prompt_template": "Q: {q"},
            {"q": "a", "response": "b"},
            r"data.prompt_template is not valid: ",
        ),
        (
            {"format": "instruction", "prompt_template": "Q:"},
            {"q": "a", "response": "b"},
            r"data.prompt_template is 'Q:', but must contain keys of the records in braces",
        ),
    ],
)
def test_a_record_of_another_format_is_an_error_that_names_it(keys, format_keys, record, message):
    records = "nothing.jsonl" if isinstance(record, str) else [record]
    if isinstance(record, str):
        message = r"data.path 'nothing.jsonl': no file of JSON lines or parquet exists"
    with pytest.raises(DataError, match=message):
        finetuning_dataset(records, {**format_keys, **keys}, seq_length=8)


def test_a_tokenizer_without_an_end_is_an_error(folder, keys, tmp_path):
    text = (folder / "tokenizer.json").read_text(encoding="utf-8").replace("<|endoftext|>", "<e>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    section = {**keys, "format": "text", "tokenizer": str(tmp_path)}
    with pytest.raises(DataError, match=r"names no token that ends .* with data.eod_id"):
        finetuning_dataset([{"text": "a"}], section, seq_length=8)
    data = finetuning_dataset([{"text": "a"}], {**section, "eod_id": "<e>"}, seq_length=8)
    assert data[0][1][0] == 0


# --- files


def test_files_of_each_kind_give_the_same_examples(keys, tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    records = [{"text": text} for text in TEXTS]
    write_lines(tmp_path / "a.jsonl", records)
    (tmp_path / "b.json").write_text(json.dumps(records))
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "c.parquet")
    half = tmp_path / "half"
    half.mkdir()
    write_lines(half / "1.jsonl", records[:9])
    parquet.write_table(arrow.Table.from_pylist(records[9:]), half / "2.parquet")
    names = ["a.jsonl", "b.json", "c.parquet", "half", "half/*"]
    sources = [[str(tmp_path / name)] for name in names]
    sources += [[str(half / "1.jsonl"), str(half / "2.parquet")]]
    wanted = finetuning_dataset(records, {"format": "text", **keys}, seq_length=64)
    for source in sources:
        data = finetuning_dataset(source, {"format": "text", **keys}, seq_length=64)
        assert data._examples.tokens.tolist() == wanted._examples.tokens.tolist()
        assert data[0][1].tolist() == wanted[0][1].tolist()


def test_files_that_are_no_records_are_refused_by_name_and_line(keys, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n[1]\n')
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{"text"\n')
    (tmp_path / "c.parquet").write_text("no parquet")
    (tmp_path / "d.csv").write_text("text\na\n")
    cases = {
        "a.jsonl": r"a.jsonl, line 2 is a list, but must be a JSON object",
        "b.jsonl": r"b.jsonl, line 2 is not JSON",
        "c.parquet": r"c.parquet cannot be read",
        "d.csv": r"d.csv is neither JSON lines .* nor parquet",
        "e.jsonl": r"data.path '.*e.jsonl': no file",
    }
    for name, message in cases.items():
        with pytest.raises(DataError, match=message):
            finetuning_dataset(str(tmp_path / name), {"format": "text", **keys}, seq_length=8)
    with pytest.raises(DataError, match=r"the records are a generator, but must have `len`"):
        finetuning_dataset((x for x in ()), {"format": "text", **keys}, seq_length=8)


def test_a_dataset_of_the_package_datasets_gives_the_same_examples(keys):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    records = [{"text": text} for text in TEXTS]
    theirs = datasets.Dataset.from_list(records)
    one = finetuning_dataset(theirs, {"format": "text", **keys}, seq_length=64)
    two = finetuning_dataset(records, {"format": "text", **keys}, seq_length=64)
    assert one._examples.tokens.tolist() == two._examples.tokens.tolist()


# --- caches, splits, resume


def test_examples_are_tokenized_once_and_again_if_records_or_keys_change(
    keys, tmp_path, monkeypatch
):
    built = []
    original = example_cache._build
    monkeypatch.setattr(
        example_cache, "_build", lambda *args: built.append(args[0].name) or original(*args)
    )
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    section = {"format": "text", **keys}
    one = finetuning_dataset(path, section, seq_length=64)
    two = finetuning_dataset(path, section, seq_length=32)
    assert len(built) == 1
    assert one.fingerprint != two.fingerprint
    assert finetuning_dataset(path, section, seq_length=64).fingerprint == one.fingerprint
    write_lines(path, [{"text": text} for text in TEXTS[:5]])
    assert finetuning_dataset(path, section, seq_length=64).fingerprint != one.fingerprint
    assert len(built) == 2
    other = finetuning_dataset(path, {**section, "eod_id": 5}, seq_length=64)
    assert len(built) == 3
    assert other[0][0]["input_ids"].tolist() != one[0][0]["input_ids"].tolist()


def config_of(section, **changes):
    return load({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "data": section})


def test_a_run_gets_the_splits_of_its_records(keys, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    section = config_of({"format": "text", "path": str(path), "split": "8,2,0", **keys}).data
    request = DataRequest(64, 7, 10, 4, 0)
    found = build_datasets(section, request)
    assert found.test is None
    assert found.vocab_size == found.tokenizer.vocab_size
    parts = [documents(*sample) for data in (found.train, found.valid) for sample in data]
    assert len({str(document) for part in parts for document in part}) == len(TEXTS)
    assert found.valid._num_examples == 5  # 20 % of 23
    assert found.train.fingerprint == found.fingerprint
    assert any("a.jsonl: 23 records" in line for line in found.description)
    other = write_lines(tmp_path / "b.jsonl", [{"text": "to be"}, {"text": " "}])
    named = section.model_copy(update={"valid_path": str(other)})
    found = build_datasets(named, request)
    assert (found.train._num_examples, found.valid._num_examples) == (23, 1)
    assert "1 without an answer are left out" in "\n".join(found.description)
    few = section.model_copy(update={"split": "1,0,0"})
    with pytest.raises(
        DataError, match=r"leaves no example of .* for valid: the files have 23 examples; give"
    ):
        build_datasets(few, request)
    with pytest.raises(DataError, match=r"model.vocab_size is 10, but the tokenizer of .* has 289"):
        build_datasets(section, DataRequest(64, 7, 10, vocab_size=10))


def test_a_resumed_loader_continues_with_the_next_packed_sample(keys):
    data = finetuning_dataset(
        [{"text": text} for text in TEXTS], {"format": "text", **keys}, seq_length=40
    )
    whole = BatchLoader(data, Share(4, 2))
    steps = [whole.next_step() for _ in range(6)]
    state = None
    first = BatchLoader(data, Share(4, 2))
    for _ in range(2):
        first.next_step()
    state = first.state_dict()
    second = BatchLoader(data, Share(4, 1))
    second.load_state_dict(state)
    for expected in steps[2:]:
        labels = torch.cat([labels for _, labels in second.next_step()])
        assert torch.equal(labels, torch.cat([labels for _, labels in expected]))
    for loader in (whole, first, second):
        loader.close()


def test_missing_keys_and_files_of_a_run_are_errors(keys, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    request = DataRequest(64, 7, 10)
    with pytest.raises(ConfigError, match=r"data.format is 'text', but data.path names no records"):
        build_datasets(config_of({"format": "text", **keys}).data, request)
    with pytest.raises(ConfigError, match=r"data.format is 'text', but data.tokenizer is missing"):
        build_datasets(config_of({"format": "text", "path": str(path)}).data, request)
    with pytest.raises(ConfigError, match=r"data.format is missing"):
        finetuning_dataset([], keys, seq_length=8)
    section = {"format": "chat", "path": [str(path), "b.jsonl"], "chat_template": "c", **keys}
    with pytest.raises(DataError, match=r"2 inputs .*\n.*'b.jsonl': no file.*\n.*template: c does"):
        check_data_inputs(config_of(section).data)
    check_data_inputs(config_of({**section, "path": str(path), "chat_template": None}).data)
    with pytest.raises(DataError, match=r"data.valid_path 'x'"):
        find_records("x", "data.valid_path")


def test_chat_needs_transformers(keys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    section = config_of({"format": "chat", **keys}).data
    with pytest.raises(ConfigError, match=r"needs transformers: pip install 'pipemega\[hf\]'"):
        build_module.finetuning_dataset([{}], section, seq_length=8)


def test_parquet_needs_pyarrow(keys, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ConfigError, match=r"a.parquet needs pyarrow: pip install pyarrow"):
        finetuning_dataset(str(tmp_path / "a.parquet"), {"format": "text", **keys}, seq_length=8)


def test_records_must_have_a_length():
    with pytest.raises(DataError, match="the records are a SimpleNamespace, but must have"):
        finetuning_dataset(SimpleNamespace(), {"format": "text"}, seq_length=8)
