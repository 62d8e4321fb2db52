import json
import os
import random

import pytest
from PIL import Image
from tiny_tokenizer import BOS_CHATML, CHATML, PidTokenizer, build

from slime.utils.data import Dataset, PromptSet, RowFormat, iter_samples, prompt_token_count, read_file
from slime.utils.processing_utils import encode_prompt, extract_media, load_tokenizer, place_media, render_chat
from slime.utils.rows import parse_data_path, read_rows

ROWS = [{"input": f"p{i}", "label": i} for i in range(10)]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    return build(tmp_path_factory.mktemp("chatml"))


def prompts(path, fmt=RowFormat(), **kwargs):
    return [sample.prompt for sample in PromptSet(path, fmt, **kwargs).samples]


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part, expected",
    [
        ("[0:3]", [0, 1, 2]),
        ("[3:]", list(range(3, 10))),
        ("[:4]", [0, 1, 2, 3]),
        ("[-3:]", [7, 8, 9]),
        ("[:-2]", list(range(8))),
        ("[1:-1]", list(range(1, 9))),
        ("[-5:-2]", [5, 6, 7]),
        ("[-100:]", list(range(10))),
    ],
)
def test_slices_of_ten_rows(write_rows, part, expected):
    path = write_rows(ROWS)
    assert [row["label"] for _, row in read_rows(f"{path}@{part}")] == expected


def test_fb_d02_negative_slice_of_five_rows(write_rows):
    path = write_rows(ROWS[:5])
    found = {part: [row["label"] for _, row in read_rows(f"{path}@{part}")] for part in ("[-2:]", "[1:3]", "[:-1]")}
    assert found == {"[-2:]": [3, 4], "[1:3]": [1, 2], "[:-1]": [0, 1, 2, 3]}


def test_path_without_slice_and_with_a_wrong_one():
    assert parse_data_path("a.jsonl") == ("a.jsonl", None)
    with pytest.raises(ValueError, match=r"@\[a:b\]"):
        parse_data_path("a.jsonl@[1:2:3]")


def test_positive_slices_do_not_read_the_rest(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input": "a"}\nbroken\n')
    assert prompts(f"{path}@[0:1]") == ["a"]


def test_fb_d03_bom_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "a"}\n\n{"input": "b"}\n')
    assert prompts(str(path)) == ["a", "b"]


@pytest.mark.parametrize("line", [b"{broken", b'{"input": "\xff"}', b"[1]"])
def test_fb_d03_a_broken_line_names_file_and_line(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"input": "a"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"{path}:2: "):
        prompts(str(path))


def test_missing_file_and_unknown_extension_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.jsonl does not exist"):
        read_rows(str(tmp_path / "none.jsonl"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(FileNotFoundError, match="folder.jsonl is a folder"):
        read_rows(str(tmp_path / "folder.jsonl"))
    (tmp_path / "a.parquet").write_text("PAR1 no more")
    with pytest.raises(ValueError, match="a.parquet: no readable Parquet file"):
        read_rows(str(tmp_path / "a.parquet"))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"'.csv'.*expected .jsonl or .parquet"):
        read_rows(str(tmp_path / "a.csv"))


def test_fb_d08_parquet_keeps_null_metadata_and_equally_long_lists(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = {
        "input": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
        "metadata": [None, {"choices": ["x", "y"]}],
        "tools": [None, None],
        "label": [["1", "2"], ["3", "4"]],
    }
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table(rows), path)
    first, second = PromptSet(path, RowFormat()).samples
    assert first.metadata == {} and second.metadata == {"choices": ["x", "y"]}
    assert (first.label, second.label) == (["1", "2"], ["3", "4"])
    assert first.prompt == [{"role": "user", "content": "a"}]
    assert [row["label"] for _, row in read_rows(path + "@[-1:]")] == [["3", "4"]]


# ---- keys ----------------------------------------------------------------------------------------------------------


def test_prompt_and_label_are_found_without_flags(write_rows):
    path = write_rows([{"prompt": "2 + 2?", "label": "4"}])
    sample = PromptSet(path, RowFormat())[0]
    assert (sample.prompt, sample.label) == ("2 + 2?", "4")
    path = write_rows([{"messages": [{"role": "user", "content": "x"}]}])
    assert PromptSet(path, RowFormat())[0].prompt == [{"role": "user", "content": "x"}]


def test_strict_args_does_not_guess_keys(write_rows):
    path = write_rows([{"prompt": "2 + 2?", "label": "4"}])
    with pytest.raises(ValueError, match="no key 'input'"):
        PromptSet(path, RowFormat(strict=True))


def test_absent_key_names_key_place_and_available_keys(write_rows):
    path = write_rows([{"input": "a", "answer": 1}, {"question": "b", "answer": 1}])
    with pytest.raises(
        ValueError, match=rf"{path}:2: no key 'input' \(--input-key\); the row has \['answer', 'question'\]"
    ):
        PromptSet(path, RowFormat())
    with pytest.raises(ValueError, match=r"no key 'label' \(--label-key\)"):
        PromptSet(path, RowFormat(label_key="label"))


def test_wrong_kinds_are_named(write_rows):
    with pytest.raises(ValueError, match="a prompt must be text or a non-empty list of messages"):
        PromptSet(write_rows([{"input": 3}]), RowFormat())
    with pytest.raises(ValueError, match="--metadata-key"):
        PromptSet(write_rows([{"input": "a", "metadata": [1]}]), RowFormat())
    for key in ("metadata", "tools"):
        with pytest.raises(
            ValueError, match=rf"data.jsonl:2: '{key}' \(--{key.removesuffix('s')}-key\): no JSON: .*'{{bad'"
        ):
            PromptSet(write_rows([{"input": "a", key: " "}, {"input": "a", key: "{bad"}]), RowFormat())
    with pytest.raises(ValueError, match="--tool-key"):
        PromptSet(write_rows([{"input": "a", "tools": {"a": 1}}]), RowFormat())


def test_tools_from_json_text_reach_metadata(write_rows):
    rows = [
        {"input": "a", "tools": json.dumps([{"name": "f"}])},
        {"input": "b", "tools": None},
        {"input": "c", "tools": ""},
    ]
    samples = PromptSet(write_rows(rows), RowFormat()).samples
    assert [sample.metadata for sample in samples] == [{"tools": [{"name": "f"}]}, {}, {}]


def test_metadata_is_not_shared_between_rows(write_rows):
    first, second = PromptSet(write_rows(ROWS[:2]), RowFormat()).samples
    first.metadata["x"] = 1
    assert second.metadata == {}


# ---- templates and lengths -----------------------------------------------------------------------------------------


def test_chat_template_renders_text_and_messages(write_rows, tokenizer):
    rows = [{"input": "hi"}, {"input": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]}]
    first, second = prompts(write_rows(rows), RowFormat(apply_chat_template=True), tokenizer=tokenizer)
    assert first == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert second.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n")


def test_messages_without_a_template_are_an_error_that_says_so(tmp_path, write_rows):
    plain = load_tokenizer(build(tmp_path / "plain", template=None))
    with pytest.raises(ValueError, match="data.jsonl:1: .*no chat template"):
        prompts(write_rows([{"input": "hi"}]), RowFormat(apply_chat_template=True), tokenizer=plain)


def test_fb_d01_length_filter_counts_tokens(tmp_path, write_rows, tokenizer):
    rows = [{"input": "ab" * 20}, {"input": "x" * 20}, {"input": "x" * 21}]
    fmt = RowFormat(max_prompt_len=20)
    found = PromptSet(write_rows(rows), fmt, tokenizer)
    assert [len(sample.prompt) for sample in found.samples] == [40, 20] and found.num_too_long == 1


def test_message_lists_are_filtered_by_their_rendered_length(write_rows, tokenizer):
    messages = [{"role": "user", "content": "hello"}]
    path = write_rows([{"input": messages}])
    tokens = len(encode_prompt(tokenizer, render_chat(tokenizer, messages)))
    assert len(PromptSet(path, RowFormat(max_prompt_len=tokens), tokenizer)) == 1
    with pytest.raises(ValueError, match="1 of them longer"):
        PromptSet(path, RowFormat(max_prompt_len=tokens - 1), tokenizer)
    assert prompt_token_count(next(iter_samples(path, RowFormat())), tokenizer) == tokens


@pytest.mark.parametrize("suffix, limit", [("@[5:2]", None), ("@[20:]", None), ("", 1)])
def test_fb_d05_an_empty_set_is_a_clear_error(write_rows, tokenizer, suffix, limit):
    with pytest.raises(ValueError, match="holds no usable prompt"):
        PromptSet(write_rows(ROWS) + suffix, RowFormat(max_prompt_len=limit), tokenizer)


#: a PNG of one pixel
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_fb_d07_mixed_modalities_keep_the_order(write_rows, tokenizer):
    rows = [{"input": f"{'<image>' * (i % 2)} q{i}", "images": [DOT] * (i % 2)} for i in range(4)]
    fmt = RowFormat(multimodal_keys={"image": "images"}, max_prompt_len=200)
    contents = [sample.prompt[0]["content"] for sample in PromptSet(write_rows(rows), fmt, tokenizer).samples]
    assert [parts[-1]["text"] for parts in contents] == [" q0", " q1", " q2", " q3"]
    assert contents[1][0] == {"type": "image", "image": DOT}


def test_media_must_match_the_placeholders():
    message = {"role": "user", "content": "<image> and <image>"}
    with pytest.raises(AssertionError, match="more <image> placeholders than image items"):
        place_media([message], {"image": ["a"]})
    with pytest.raises(AssertionError, match="media without a placeholder.*image"):
        place_media([message], {"image": ["a", "b", "c"]})
    item = {"type": "image", "image": "a", "max_pixels": 5}
    assert place_media([message], {"image": [item, "b"]})[0]["content"][0] is item
    parts = place_media([message], {"image": ({"image": "a", "max_pixels": 5}, {"bytes": b"png", "path": None})})
    assert parts[0]["content"][0] == item
    assert parts[0]["content"][2] == {"type": "image", "image": {"bytes": b"png", "path": None}}


@pytest.mark.parametrize(
    ("limits", "size"),
    [({}, (8, 2)), ({"max_pixels": 4}, (4, 1)), ({"min_pixels": 64}, (16, 4)), ({"max_pixels": 99}, (8, 2))],
)
def test_an_image_keeps_to_the_limits_of_its_part(limits, size):
    part = {"type": "image", "image": Image.new("RGB", (8, 2)), **limits}
    assert extract_media([{"role": "user", "content": [part]}])["images"][0].size == size


def test_a_row_may_hold_one_medium_by_itself_and_a_bad_one_names_its_line(write_rows):
    fmt = RowFormat(multimodal_keys={"image": "picture", "audio": "sound"})
    row = {"input": "<image> <audio>", "picture": DOT, "sound": "a.wav"}
    (sample,) = iter_samples(write_rows([row]), fmt)
    assert sample.multimodal_inputs["images"][0].size == (1, 1) and sample.multimodal_inputs["audios"] == ["a.wav"]
    for bad in ({**row, "picture": "no such picture"}, {**row, "input": "<image>"}, {**row, "input": "<audio>" * 2}):
        with pytest.raises(ValueError, match=r"data.jsonl:2: --multimodal-keys: "):
            list(iter_samples(write_rows([row, bad]), fmt))


@pytest.mark.parametrize("template", [CHATML, BOS_CHATML])
def test_fb_t12_exactly_one_bos_where_the_tokenizer_adds_one(tmp_path, template):
    tokenizer = load_tokenizer(build(tmp_path / "bos", template=template, add_bos=True))
    text = render_chat(tokenizer, [{"role": "user", "content": "hi"}])
    ids = encode_prompt(tokenizer, text)
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


def test_fb_t12_no_bos_without_a_bos_token(tokenizer):
    assert encode_prompt(tokenizer, "hi") == tokenizer.encode("hi", add_special_tokens=False)


def test_prompt_set_hands_out_the_next_ones(write_rows):
    found = PromptSet(write_rows(ROWS[:3]), RowFormat())
    assert [s.prompt for s in found.sample(2) + found.sample(2)] == ["p0", "p1", "p2", "p0"]


def test_workers_make_prompts_in_other_processes_and_change_nothing_else(write_rows):
    rows = [{"input": "x" * (1 + i % 7), "label": i} for i in range(700)]
    fmt = RowFormat(label_key="label", apply_chat_template=True, max_prompt_len=5)
    path = write_rows(rows)
    alone = PromptSet(path, fmt, PidTokenizer())
    shared = PromptSet(path, fmt, PidTokenizer(), num_workers=2)
    assert {int(s.prompt.split()[1]) for s in alone.samples} == {os.getpid()}
    pids = {int(s.prompt.split()[1]) for s in shared.samples}
    assert os.getpid() not in pids and 1 <= len(pids) <= 2
    assert [(s.prompt.split()[0], s.label) for s in shared.samples] == [
        (s.prompt.split()[0], s.label) for s in alone.samples
    ]
    assert shared.num_too_long == alone.num_too_long == 200
    rows[600] = {"input": 3}
    with pytest.raises(ValueError, match=":601: "):
        PromptSet(write_rows(rows), fmt, PidTokenizer(), num_workers=2)


def test_a_dataset_of_ones_own_has_the_fields_order_of_epochs(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = Dataset(str(path), tokenizer, None, None, prompt_key="input", label_key="label", seed=3)
    first = [sample.prompt for sample in data.samples]
    orders = []
    for epoch in (0, 1, 1, 0):
        data.shuffle(epoch)
        orders.append([sample.prompt for sample in data.samples])
        assert data[2] is data.samples[2]
    assert first == [row["input"] for row in ROWS] and orders[0] == orders[3] != orders[1] == orders[2]
    expected = list(first)
    random.Random(3).shuffle(expected)
    assert orders[0] == expected and [row["label"] for row in read_file(f"{path}@[2:4]")] == [2, 3]
