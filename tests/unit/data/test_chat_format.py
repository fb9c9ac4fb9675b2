"""Conversations: which tokens the loss counts, for each kind of chat template."""

import json

import numpy as np
import pytest

from pipemega.data.finetuning.conversations import ChatFormat, answer_spans, tokens_in
from pipemega.data.finetuning.record_files import Record
from pipemega.data.tokens.tokenizers import load_tokenizer
from pipemega.errors import DataError
from tests.unit.data import chat_templates
from tests.unit.data.chat_templates import TWO_TURNS
from tests.unit.data.tokenizer_files import bpe_files

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return bpe_files(
        tmp_path_factory.mktemp("tokenizer"),
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )


def chat_format(folder, tmp_path, template, key=None):
    path = tmp_path / "template.jinja"
    path.write_text(template, encoding="utf-8")
    return ChatFormat(str(folder), str(path), key)


def answers_of(folder, tmp_path, template, messages=TWO_TURNS, **content):
    """Return the text of the tokens that count, and of the others."""
    form = chat_format(folder, tmp_path, template)
    (example,) = form.examples([Record({"messages": messages, **content}, "here", 1)])
    assert example is not None
    decode = load_tokenizer(folder).decode
    tokens, mask = example.tokens, example.is_answer
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return [decode(tokens[first:last]) for first, last in edges], decode(tokens[~mask])


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        ("CHATML", ["or not<|im_end|>\n", "the question<|im_end|>\n"]),
        ("MARKED", ["or not<end>", "the question<end>"]),
        ("INSTRUCT", [" or not<|endoftext|>", " the question<|endoftext|>"]),
        ("OPENED", ["or not<|im_end|>\n", "the question<|im_end|>\n"]),
        (
            "THINKING",
            ["or not<|im_end|>\n", "<think>\n\n</think>\n\nthe question<|im_end|>\n"],
        ),
    ],
)
def test_the_loss_counts_the_answers_of_all_turns_and_nothing_else(
    template, answers, folder, tmp_path
):
    found, rest = answers_of(folder, tmp_path, getattr(chat_templates, template))
    assert found == answers
    assert "to be" in rest
    assert "that is" in rest


def test_the_tokens_are_those_of_the_template_with_one_beginning(folder, tmp_path):
    from transformers import AutoTokenizer

    template = chat_templates.INSTRUCT
    form = chat_format(folder, tmp_path, template)
    (example,) = form.examples([Record({"messages": TWO_TURNS}, "here", 1)])
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = theirs.apply_chat_template(TWO_TURNS, chat_template=template)["input_ids"]
    assert example.tokens.tolist() == ids
    assert ids.count(0) == 3  # one beginning, two ends


def test_marked_answers_are_the_assistant_mask_of_transformers(folder, tmp_path):
    form = chat_format(folder, tmp_path, chat_templates.MARKED)
    assert form.marks_answers
    (example,) = form.examples([Record({"messages": TWO_TURNS}, "here", 1)])
    # The same template without the marks: found by comparing texts.
    plain = chat_templates.MARKED.replace("{% generation %}", "")
    plain = plain.replace("{% endgeneration %}", "")
    (other,) = chat_format(folder, tmp_path, plain).examples(
        [Record({"messages": TWO_TURNS}, "here", 1)]
    )
    assert example.tokens.tolist() == other.tokens.tolist()
    assert example.is_answer.tolist() == other.is_answer.tolist()


def test_names_of_sharegpt_and_messages_of_other_roles_are_accepted(folder, tmp_path):
    sharegpt = [
        {"from": "system", "value": "be"},
        {"from": "human", "value": "to be"},
        {"from": "gpt", "value": "or not"},
    ]
    form = chat_format(folder, tmp_path, chat_templates.CHATML)
    (one,) = form.examples([Record({"conversations": sharegpt}, "here", 1)])
    same = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "to be", "name": None},
        {"role": "assistant", "content": "or not"},
    ]
    (two,) = form.examples([Record({"messages": same}, "here", 1)])
    assert one.tokens.tolist() == two.tokens.tolist()
    assert one.is_answer.tolist() == two.is_answer.tolist()


def test_records_without_an_answer_or_with_an_empty_one_are_left_out(folder, tmp_path):
    form = chat_format(folder, tmp_path, chat_templates.CHATML)
    empty = [*TWO_TURNS[:3], {"role": "assistant", "content": " \n"}]
    found = form.examples(
        [
            Record({"messages": TWO_TURNS[:1]}, "a", 1),
            Record({"messages": TWO_TURNS}, "b", 1),
            Record({"messages": empty}, "c", 1),
        ]
    )
    assert [example is not None for example in found] == [False, True, False]
    assert form.examples([Record({"messages": TWO_TURNS[:1]}, "a", 1)]) == [None]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (
            "ONLY_QUESTIONS",
            TWO_TURNS,
            r"here: the chat template hides the answer in message 1 \('or not'\), so no loss",
        ),
        (
            "THINKING",
            [TWO_TURNS[0], {"role": "assistant", "content": "<think>x</think>y"}, *TWO_TURNS[2:]],
            r"hides the answer in message 1 \('<think>x</think>y'\), .* make it the last message",
        ),
        (
            "LATE_SYSTEM",
            TWO_TURNS,
            r"renders the messages before message 1 differently .* \{% generation %\}",
        ),
        (
            "MARKED",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"text": "x"}]}],
            r"here: the chat template refuses the messages: ",
        ),
    ],
)
def test_an_answer_that_cannot_be_found_is_an_error(template, messages, message, folder, tmp_path):
    with pytest.raises(DataError, match=message):
        answers_of(folder, tmp_path, getattr(chat_templates, template), messages)


def test_a_template_can_refuse_messages_with_its_own_words(folder, tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"here: the chat template refuses .* must alternate"):
        answers_of(folder, tmp_path, template)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"text": "a"}, r"here has no key 'messages' or 'conversations'; its keys are 'text'"),
        ({"messages": "a"}, r"here: 'messages' must be a list of messages"),
        ({"messages": ["a"]}, r"here: messages\[0\] is a str, but must be an object"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] has no role; its keys are 'content'"),
    ],
)
def test_a_record_without_messages_is_an_error_that_names_it(content, message, folder, tmp_path):
    with pytest.raises(DataError, match=message):
        chat_format(folder, tmp_path, chat_templates.CHATML).examples([Record(content, "here", 1)])


def test_a_tokenizer_without_template_and_a_folder_without_tokenizer_are_errors(folder, tmp_path):
    with pytest.raises(DataError, match=r"has no chat template: name a file with one by data.cha"):
        ChatFormat(str(folder), None, None)
    with pytest.raises(DataError, match=r"data.chat_template '.*none.jinja' cannot be read"):
        ChatFormat(str(folder), str(tmp_path / "none.jinja"), None)
    with pytest.raises(DataError, match=r"is not a Hugging Face tokenizer, which data.format 'ch"):
        ChatFormat(str(tmp_path), None, None)
    # Code of the folder does not run.
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}})
    )
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(DataError, match=r"is not a Hugging Face tokenizer"):
        ChatFormat(str(tmp_path), None, None)


def test_the_spans_of_answers_equal_the_docstring():
    names = {"user": "<user>", "assistant": "<assistant>"}

    def render(messages, add):
        text = "".join(names[m["role"]] + m["content"] + "<end>" for m in messages)
        return text + "<assistant>" if add else text

    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "hi"},
    ]
    full = render(messages, False)
    assert [full[a:b] for a, b in answer_spans(messages, render, full)] == ["hi<end>"]
    first = [{"role": "assistant", "content": "welcome"}, *messages]
    full = render(first, False)
    spans = [full[a:b] for a, b in answer_spans(first, render, full)]
    assert spans == ["welcome<end>", "hi<end>"]


def test_a_token_counts_if_it_contains_a_character_of_an_answer():
    offsets = np.array([[0, 2], [2, 5], [5, 5], [5, 7], [7, 9]])
    assert tokens_in([(4, 7)], offsets).tolist() == [False, True, False, True, False]
    # Offsets without white space: [5, 8] is a token of spaces only.
    trimmed = np.array([[0, 2], [2, 5], [8, 8], [9, 11], [14, 14]])
    assert tokens_in([(3, 11)], trimmed).tolist() == [False, True, True, True, False]
