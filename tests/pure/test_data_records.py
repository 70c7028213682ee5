"""Lines of a source, in the forms that are read and in those that are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flagscale.config.errors import UserError
from flagscale.data.records import IMAGE, VIDEO, Media, MediaSlot, Record, SampleError, Turn, parse_record

GOOD_ANSWER = {"from": "gpt", "value": "3"}


def read(**data: Any) -> Record:
    return parse_record(json.dumps(data))


def sharegpt(question: str, answer: str = "3", **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}], **more}


def test_both_forms_give_the_same_record() -> None:
    expected = Record(
        "7",
        (Turn("user", (MediaSlot(0), "and", MediaSlot(1), "which?")), Turn("assistant", ("3 1",))),
        (Media(IMAGE, "a.png"), Media(IMAGE, "b/c.png")),
    )
    images = ["a.png", "b/c.png"]
    text = "<image>and<image>which?\n"
    assert read(**sharegpt(text, " 3 1 ", images=images, id=7)) == expected
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "3 1"}]
    assert read(messages=messages, images=images, id="7") == expected
    parts = [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": "file://b/c.png"}},
        {"type": "text", "text": "which?"},
    ]
    answer = [{"type": "text", "text": "3 1"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    assert read(messages=messages, id="7") == expected


def test_llava_names_one_image_by_image() -> None:
    record = read(**sharegpt("<image>\nWhich?", image="a.png"))
    assert record.media == (Media(IMAGE, "a.png"),)
    assert record.turns[0].parts == (MediaSlot(0), "\nWhich?")


def test_llava_marks_a_video_as_an_image_and_leaves_the_image_of_a_text_empty() -> None:
    record = read(**sharegpt("<image>\nWhat happens?", video="a.mp4"))
    assert record.media == (Media(VIDEO, "a.mp4"),)
    assert record.turns[0].parts == (MediaSlot(0), "\nWhat happens?")
    with pytest.raises(SampleError, match="1 '<image>' placeholder"):
        read(**sharegpt("<image><video>?", videos=["a.mp4", "b.mp4"]))
    assert read(**sharegpt("Which?", image="")).media == ()


@pytest.mark.parametrize(
    "part", [{"image": "a.png"}, {"url": "a.png"}, {"path": "a.png"}, {"image": None, "path": "a.png"}]
)
def test_a_part_names_its_image_by_any_of_three_keys(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "image", **part}]}, {"role": "assistant", "content": "3"}]
    assert read(messages=messages).media == (Media(IMAGE, "a.png"),)


def test_a_system_text_beside_the_turns_is_their_first() -> None:
    system = Turn("system", ("Be brief.",))
    record = read(**sharegpt("?"), system=" Be brief. ")
    assert record.turns == (system, *read(**sharegpt("?")).turns)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "3"}]
    assert read(messages=messages, system="Be brief.") == record
    assert read(messages=[{"role": "system", "content": "Be brief."}, *messages], system="Be long.") == record
    for nothing in ("", " ", None):
        assert read(**sharegpt("?"), system=nothing) == read(**sharegpt("?"))


def test_a_text_beside_media_is_their_caption() -> None:
    record = read(text=" A cat. ", image="a.png", videos=["b.mp4"])
    assert record.media == (Media(IMAGE, "a.png"), Media(VIDEO, "b.mp4"))
    assert record.turns == (Turn("user", (MediaSlot(0), MediaSlot(1))), Turn("assistant", ("A cat.",)))
    assert read(text="<image>").turns[0].parts == ("<image>",), "a document is taken as it is"


def test_image_parts_may_refer_to_the_list() -> None:
    messages = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": "3"},
    ]
    record = read(messages=messages, images=["a.png"])
    assert record.media == (Media(IMAGE, "a.png"),)
    assert [turn.role for turn in record.turns] == ["system", "user", "assistant"]


def test_placeholders_count_on_over_the_turns() -> None:
    turns = [
        {"from": "human", "value": "<image>a"},
        GOOD_ANSWER,
        {"from": "human", "value": "b<image>"},
        GOOD_ANSWER,
    ]
    record = read(conversations=turns, images=["a.png", "b.png"])
    assert record.turns[2].parts == ("b", MediaSlot(1))


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"conversations": [', "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        ("[1, 2]", "is a JSON list"),
        ('{"text": "a <image>", "image": "a.png"}', "placeholders in the caption"),
        (json.dumps({**sharegpt("x"), "system": 3}), "content is a int"),
        ("{}", "has none of 'conversations', 'messages' and 'text'"),
        ('{"text": " "}', "has an empty text"),
        ('{"conversations": []}', "not a list with at least one turn"),
        ('{"messages": "hello"}', "not a list with at least one turn"),
        ('{"messages": [{"role": "user"}]}', "without 'from' and 'value' or 'role' and 'content'"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "role 'robot'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "content is a int"),
        ('{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}', "type 'audio'"),
        ('{"messages": [{"role": "user", "content": [{"type": "image", "image": 3}]}]}', "not a list of file names"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no assistant turn"),
        (json.dumps(sharegpt("x", "  ")), "an assistant turn without text"),
        (json.dumps(sharegpt("<image>x")), "1 '<image>' placeholder(s) and 0 image(s)"),
        (json.dumps(sharegpt("x", images=["a.png"])), "0 '<image>' placeholder(s) and 1 image(s)"),
        (json.dumps(sharegpt("<image><image>x", images=["a.png"])), "2 '<image>' placeholder(s) and 1 image(s)"),
        (json.dumps(sharegpt("<image>x", images=[""])), "not a list of file names"),
        (json.dumps(sharegpt("<image>x", images={"a": 1})), "not a list of file names"),
        (json.dumps(sharegpt("x", videos=["a.mp4"])), "0 '<video>' placeholder(s) and 1 video(s)"),
        (json.dumps(sharegpt("x", "<image>3", images=["a.png"])), "outside the user's turns"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "images": ["b.png"]}',
            "both in its parts and by",
        ),
    ],
)
def test_a_line_that_cannot_be_used_says_why(line: str | bytes, cause: str) -> None:
    with pytest.raises(SampleError) as caught:
        parse_record(line)
    assert cause in str(caught.value)
    assert isinstance(caught.value, UserError)
