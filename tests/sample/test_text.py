"""Prompts and texts: with and without a template, whole and piece by piece."""

from hypothesis import given
from hypothesis import strategies as st

from flatout.data.tokenizer import ByteTokenizer
from flatout.sample import Sampling, pieces, prompt_ids, stop_texts, text_of

TOKENIZER = ByteTokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_pieces_are_the_text(text: str) -> None:
    got = list(pieces(TOKENIZER, text.encode()))
    assert "".join(got) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


@given(st.lists(st.integers(min_value=0, max_value=300)))
def test_garbage_is_shown_as_such_and_never_held_back_for_long(ids: list[int]) -> None:
    waiting = 0
    for _ in pieces(TOKENIZER, ids):
        waiting += 1
    assert waiting >= sum(32 <= i < 127 for i in ids) / 5


def test_without_a_template_questions_are_to_be_continued() -> None:
    messages = [
        {"role": "system", "content": "Be right."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    text = TOKENIZER.decode(prompt_ids(TOKENIZER, messages))
    assert text == "Be right.\n\nQuestion: One?\n\nAnswer: 1\n\nQuestion: Two?\nAnswer:"
    sampling = Sampling(max_tokens=9, stop_ids=frozenset({256}), stop_texts=stop_texts(TOKENIZER))
    assert text_of(TOKENIZER, [*b" 2\n\nQuestion: Three?"], sampling) == " 2"
    assert text_of(TOKENIZER, [*b" 2", 256], sampling) == " 2"
