"""Prompt sources: what they read, that the split is the same everywhere, and that mistakes are named."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
import yaml
from PIL import Image

from genrl.config import build, build_part, load_config
from genrl.prompts import (
    HuggingFaceDataset,
    ImageFolder,
    JsonLines,
    Prompt,
    PromptList,
    TextFile,
    hash_position,
    split_prompts,
)

WORDS = [f"a photo of object number {i}" for i in range(200)]


def lines(path, texts):
    path.write_text("".join(f"{text}\n" for text in texts))
    return str(path)


def records(path, entries):
    return lines(path, [json.dumps(entry) for entry in entries])


def texts(prompts):
    return [prompt.text for prompt in prompts]


# ------------------------------------------------------------------------------------------------------ the split


def test_the_position_of_a_text_is_a_known_number_in_every_process():
    digest = hashlib.sha256(b"a cat").digest()
    assert hash_position("a cat") == pytest.approx(int.from_bytes(digest[:8], "big") / 2**64, abs=1e-15)
    code = "from genrl.prompts import hash_position; print(hash_position('a cat'))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "PATH": ""},
    )
    assert float(found.stdout) == hash_position("a cat")


def test_a_share_is_about_that_share_and_no_prompt_moves_when_others_are_added():
    few, many = [Prompt(t) for t in WORDS[:100]], [Prompt(f"{t} {k}") for t in WORDS for k in range(20)]
    train, held_out = split_prompts(many, 0.1)
    assert abs(len(held_out) / len(many) - 0.1) < 0.015 and len(train) + len(held_out) == len(many)
    before = set(texts(split_prompts(few, 0.1)[1]))
    after = set(texts(split_prompts([*reversed(few), *many], 0.1)[1]))
    assert before and before == after & set(texts(few))


def test_equal_texts_stay_two_prompts_on_one_side():
    prompts = [Prompt(t, {"n": k}) for t in WORDS for k in range(3)]
    for held_out in (0.2, 17):
        train, kept = split_prompts(prompts, held_out)
        assert not set(texts(train)) & set(texts(kept)) and len(train) + len(kept) == 600
        assert [p.metadata["n"] for p in kept] == [0, 1, 2] * (len(kept) // 3)
    assert len(set(texts(kept))) == 17


def test_order_is_kept_and_limits_take_the_first():
    train, kept = split_prompts([Prompt(t) for t in WORDS], 0.2, max_train=5, max_held_out=3)
    whole, unseen = split_prompts([Prompt(t) for t in WORDS], 0.2)
    assert (train, kept) == (whole[:5], unseen[:3]) and texts(whole) == sorted(texts(whole), key=WORDS.index)


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([], {"held_out": 0.5}, "holds no prompt"),
        (["a"], {"held_out": 0.5}, "leaves none of 1 different prompts"),
        (["a", "b"], {"held_out": 1e-9}, r"to evaluate on.*hold out more, such as held_out: 1"),
        (["a", "b"], {"held_out": 2}, r"to train on.*hold out fewer, such as held_out: 1"),
        (["a", "b"], {"held_out": 0}, "held_out = 0 must be a share below 1"),
        (["a", "b"], {"held_out": 1.5}, r"held_out = 1\.5 must be"),
        (["a", "b"], {"held_out": 1, "max_train": 0}, "max_train = 0 must be at least 1"),
    ],
)
def test_splits_that_leave_nothing_are_refused(prompts, arguments, message):
    with pytest.raises(ValueError, match=message):
        split_prompts([Prompt(t) for t in prompts], **arguments)


# ---------------------------------------------------------------------------------------------------------- files


def test_a_text_file_is_read_line_by_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeff# licence\r\n  a cat \r\n\r\nno # comment\r\na\u2028b\r\n#1 fan\r\n".encode())
    source = TextFile(str(path), held_out=1)
    assert sorted(texts([*source.train, *source.held_out])) == ["a cat", "a\u2028b", "no # comment"]
    source = TextFile(str(path), held_out=1, comment=None)
    assert {"# licence", "#1 fan"} <= set(texts([*source.train, *source.held_out]))


def test_two_files_are_two_sides_and_what_both_hold_is_not_trained_on(tmp_path):
    train, test = lines(tmp_path / "train.txt", ["a", "b", "c", "b"]), lines(tmp_path / "test.txt", ["b", "d"])
    with pytest.warns(UserWarning, match=r"1 prompts are held out as well and not trained on \('b'\)"):
        source = TextFile(train, held_out=test, max_train=1)
    assert texts(source.train) == ["a"] and texts(source.held_out) == ["b", "d"]
    with pytest.raises(ValueError, match="all prompts to train on are held out"):
        TextFile(train, held_out=train)


def test_json_lines_keep_their_metadata(tmp_path):
    spec = {"prompt": "two cats", "include": [{"class": "cat", "count": 2}], "text": "x", "n": 1}
    path = records(tmp_path / "a.jsonl", [spec, {"prompt": "a dog"}])
    source = JsonLines(path, held_out=1)
    found = {p.text: p.metadata for p in (*source.train, *source.held_out)}
    assert found == {"two cats": {k: v for k, v in spec.items() if k != "prompt"}, "a dog": {}}
    caption = records(tmp_path / "b.jsonl", [{"caption": t, "text": t, "junk": 0} for t in "ab"])
    source = JsonLines(caption, held_out=1, prompt="caption", keys=["text"])
    assert {p.text: p.metadata for p in (*source.train, *source.held_out)} == {"a": {"text": "a"}, "b": {"text": "b"}}


def test_images_of_json_lines_are_found_beside_the_file_and_are_on_one_side(tmp_path):
    for i in range(6):
        Image.new("RGB", (2, 2)).save(tmp_path / f"{i}.png")
    entries = [{"prompt": what, "image": f"{i}.png"} for i in range(6) for what in ("make it red", "make it blue")]
    source = JsonLines(records(tmp_path / "a.jsonl", entries), held_out=2)
    sides = [{p.metadata["image"] for p in side} for side in (source.train, source.held_out)]
    assert not sides[0] & sides[1] and [len(s) for s in sides] == [4, 2] and len(source.held_out) == 4
    assert str(tmp_path / "0.png") in sides[0] | sides[1]
    with pytest.raises(FileNotFoundError, match=r"line 1 names the image 'none.png'"):
        JsonLines(records(tmp_path / "b.jsonl", [{"prompt": "x", "image": "none.png"}]))


def test_images_of_one_name_in_different_folders_are_different_images(tmp_path):
    """Scenes with a folder each; the list may also name images elsewhere, by any path."""
    for place in ("list/a", "list/b", "other"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(tmp_path / place / "first.png")
    names = ["a/first.png", "b/first.png", str(tmp_path / "other" / "first.png")]
    entries = [{"prompt": "move", "image": name} for name in names]
    source = JsonLines(records(tmp_path / "list" / "x.jsonl", entries), held_out=1)
    assert (len(source.train), len(source.held_out)) == (2, 1)
    records(tmp_path / "list" / "metadata.jsonl", [{"prompt": "move", "file_name": name} for name in names])
    folder = ImageFolder(str(tmp_path / "list"), held_out=1)
    assert {p.metadata["image"] for p in folder.held_out} == {p.metadata["image"] for p in source.held_out}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n\n{"prompt": "b"\n', r"a\.jsonl, line 3 is not valid JSON.*column"),
        ('{"prompt": "a"}\n[1]\n', "line 2 is a list"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2 has no key 'prompt'; its keys are text"),
        ('{"prompt": 7}\n', "line 1: 'prompt' is 7; a prompt is a string"),
        ("\n\n", r"a\.jsonl holds no prompt"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        JsonLines(str(tmp_path / "a.jsonl"))


def test_missing_files_and_other_encodings_are_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"prompt file 'nowhere\.txt' does not exist; relative paths start from"
    ):
        TextFile("nowhere.txt")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        JsonLines(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"file of held-out prompts 'no\.txt'"):
        TextFile(lines(tmp_path / "a.txt", "ab"), held_out="no.txt")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"is not UTF-8 \(byte 3\)"):
        TextFile(str(tmp_path / "b.txt"))


def test_prompts_can_stand_in_the_configuration():
    source = PromptList(["a", "b"], ["c"])
    assert texts(source.train) == ["a", "b"] and texts(source.held_out) == ["c"]
    with pytest.raises(ValueError, match="2 prompts to train on and 0 held out"):
        PromptList(["a", "b"], [])


# ---------------------------------------------------------------------------------------------- folders of images


def folder_of(tmp_path, *names):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(tmp_path / name)
    return tmp_path


def test_images_take_their_prompts_from_files_beside_them_or_from_the_template(tmp_path):
    folder_of(tmp_path, "red_car.png", "pets/old_dog.jpg", "blue.webp")
    (tmp_path / "red_car.txt").write_text("make it blue\n\nadd snow\n")
    (tmp_path / "notes.md").write_text("no image")
    source = ImageFolder(str(tmp_path), prompt="{name} of {folder}", held_out=1)
    found = sorted((p.text, p.metadata["image"]) for p in (*source.train, *source.held_out))
    assert found == sorted([
        ("make it blue", str(tmp_path / "red_car.png")), ("add snow", str(tmp_path / "red_car.png")),
        ("old dog of pets", str(tmp_path / "pets/old_dog.jpg")),
        (f"blue of {tmp_path.name}", str(tmp_path / "blue.webp")),
    ])  # fmt: skip
    assert len({p.metadata["image"] for p in source.held_out}) == 1
    with pytest.raises(ValueError, match=r"blue\.webp has no prompt: no blue\.txt"):
        ImageFolder(str(tmp_path))
    with pytest.raises(ValueError, match=r"is no template.*may use \{name\}"):
        ImageFolder(str(tmp_path), prompt="{nam}")


def test_a_metadata_file_lists_images_prompts_and_more(tmp_path):
    folder_of(tmp_path, "a.png", "b.png", "unused.png")
    entries = [{"file_name": n, "text": f"edit {n}", "strength": 0.5} for n in ("a.png", "b.png")]
    records(tmp_path / "metadata.jsonl", entries)
    source = ImageFolder(str(tmp_path), held_out=1, key="text")
    found = {p.text: p.metadata for p in (*source.train, *source.held_out)}
    assert found["edit a.png"] == {"strength": 0.5, "image": str(tmp_path / "a.png")} and len(found) == 2
    records(tmp_path / "metadata.jsonl", [{"file_name": "c.png", "prompt": "x"}])
    with pytest.raises(FileNotFoundError, match=r"line 1 names the image 'c.png'"):
        ImageFolder(str(tmp_path))


def test_the_side_of_an_image_does_not_depend_on_where_the_folder_is(tmp_path):
    names = [f"{i}.png" for i in range(12)]
    sides = []
    for place in ("here", "elsewhere/deep"):
        source = ImageFolder(str(folder_of(tmp_path / place, *names)), prompt="edit", held_out=3)
        sides.append([p.metadata["image"].rpartition("/")[2] for p in source.held_out])
    assert sides[0] == sides[1] and len(sides[0]) == 3


def test_folders_without_images_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no image"):
        ImageFolder(str(tmp_path), prompt="x")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        ImageFolder(str(tmp_path / "nowhere"))


# ------------------------------------------------------------------------------------------ Hugging Face data sets


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A data set with two splits, an image column and a text, written by `save_to_disk`, and the same as files."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("hub")
    datasets.disable_progress_bars()

    def part(count, start):
        rows = range(start, start + count)
        columns = {
            "caption": [WORDS[i] for i in rows], "target": [str(i) for i in rows],
            "image": [Image.new("RGB", (4, 4), (i, 0, 0)) for i in rows],
        }  # fmt: skip
        features = {"caption": datasets.Value("string"), "target": datasets.Value("string"), "image": datasets.Image()}
        return datasets.Dataset.from_dict(columns, features=datasets.Features(features))

    datasets.DatasetDict(train=part(20, 0), test=part(5, 18)).save_to_disk(str(folder / "disk"))
    part(8, 0).save_to_disk(str(folder / "one"))
    (folder / "files").mkdir()
    records(folder / "files" / "train.jsonl", [{"prompt": t, "text": t[-1]} for t in WORDS[:30]])
    return folder


def test_a_saved_data_set_gives_prompts_metadata_and_images(saved):
    source = HuggingFaceDataset(
        str(saved / "disk"), prompt="caption", columns={"text": "target", "image": "image"}, held_out=4
    )
    assert (len(source.train), len(source.held_out)) == (16, 4)
    prompt = source.held_out[0]
    assert WORDS[int(prompt.metadata["text"])] == prompt.text
    assert prompt.metadata["image"].convert("RGB").getpixel((0, 0)) == (int(prompt.metadata["text"]), 0, 0)
    everything = HuggingFaceDataset(str(saved / "one"), prompt="caption", held_out=0.3)
    assert set(everything.train[0].metadata) == {"target", "image"}


def test_another_split_is_held_out_and_never_trained_on(saved):
    with pytest.warns(UserWarning, match="2 prompts are held out as well"):
        source = HuggingFaceDataset(str(saved / "disk"), prompt="caption", held_out="test", max_train=7)
    assert texts(source.held_out) == WORDS[18:23] and texts(source.train) == WORDS[:7]
    with pytest.raises(ValueError, match="no split 'dev'; its splits are train, test"):
        HuggingFaceDataset(str(saved / "disk"), prompt="caption", held_out="dev")
    with pytest.raises(ValueError, match="no column 'prompt'; its columns are caption, target, image"):
        HuggingFaceDataset(str(saved / "disk"))


def test_a_folder_of_data_files_goes_through_load_dataset(saved, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    source = HuggingFaceDataset(str(saved / "files"), held_out=3, max_train=9)
    assert (len(source.train), len(source.held_out)) == (9, 3)
    assert source.held_out == JsonLines(str(saved / "files" / "train.jsonl"), held_out=3).held_out


@pytest.mark.parametrize("held_out", [0.1, 500, "validation"])
def test_a_data_set_of_the_hub_has_a_small_twin(tmp_path, held_out):
    pytest.importorskip("datasets")
    arguments = {
        "path": "nobody/nothing", "prompt": "caption", "held_out": held_out, "revision": "main",
        "columns": {"text": "words", "image": "picture"},
    }  # fmt: skip
    source = HuggingFaceDataset(**HuggingFaceDataset.tiny_arguments(arguments, tmp_path))
    assert len(source.train) >= 12 and len(source.held_out) >= 4
    assert not set(texts(source.train)) & set(texts(source.held_out))
    assert source.train[0].metadata["image"].size == (32, 32) and source.train[0].metadata["text"]
    local = {"path": str(tmp_path)}
    assert HuggingFaceDataset.tiny_arguments(local, tmp_path) is local


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'pip install "genrl\[datasets\]"'):
        HuggingFaceDataset("x/y")


# ---------------------------------------------------------------------------------------------------------- config


def test_a_configuration_names_a_source_with_its_arguments(tmp_path):
    tree = {
        "generator": "toy.ToyGenerator", "reward": "toy.HalfBrightness", "algorithm": "genrl.algorithms.PolicyGradient",
        "prompts": {"class_path": "genrl.prompts.TextFile",
                    "init_args": {"path": lines(tmp_path / "p.txt", WORDS), "held_out": 0.05}},
    }  # fmt: skip
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(tree))
    source = build(load_config(path))["prompts"]
    assert 0 < len(source.held_out) < 30 and len(source.train) + len(source.held_out) == 200
    for value, expected in (("20", 20), ("20.0", 20)):
        assert len(build(load_config(path, [f"prompts.held_out={value}"]))["prompts"].held_out) == expected
    assert texts(
        build(load_config(path, [f"prompts.held_out={lines(tmp_path / 'q.txt', 'ab')}"]))["prompts"].held_out
    ) == ["a", "b"]
    raw = {
        "class_path": "genrl.prompts.JsonLines",
        "init_args": {"path": records(tmp_path / "p.jsonl", [{"prompt": "x"}])},
    }
    with pytest.raises(ValueError, match=r"prompts: .*leaves none of 1 different prompts"):
        build_part(raw, "prompts")
