"""Every form that a source may have: the same samples read from each, and from where they lie only."""

from __future__ import annotations

import base64
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flagscale.config.errors import UserError
from flagscale.data.corpus import Corpus
from flagscale.data.parquet import ParquetStore
from flagscale.data.records import SampleError
from flagscale.data.stores import open_store
from flagscale.data.webdataset import TarStore, expand_braces, shards, split_key
from tests.data.helpers import make_config, save_image

COUNT = 5


def turns(i: int) -> list[dict[str, str]]:
    return [{"from": "human", "value": "<image>" * (i % 3) + "Which?"}, {"from": "gpt", "value": f"number {i}"}]


def pictures(folder: Path, i: int) -> list[str]:
    """Files of sample i, which has i % 3 images."""
    folder.mkdir(parents=True, exist_ok=True)
    return [save_image(folder / f"{i}-{k}.png", 64 + 32 * i, 96, seed=10 * i + k) for k in range(i % 3)]


def records(folder: Path) -> list[dict[str, Any]]:
    return [{"id": f"s{i}", "conversations": turns(i), "images": pictures(folder, i)} for i in range(COUNT)]


def as_jsonl(folder: Path) -> Path:
    path = folder / "s.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records(folder)))
    return path


def as_json(folder: Path) -> Path:
    """One list over several lines, with characters of more than one byte."""
    path = folder / "s.json"
    text = json.dumps([{"note": "\u00e9\u4e2d", **record} for record in records(folder)], indent=1, ensure_ascii=False)
    path.write_text(text, encoding="utf-8")
    return path


def as_data_uris(folder: Path) -> Path:
    path = folder / "s.jsonl"
    lines = []
    for record in records(folder):
        encoded = [base64.b64encode((folder / name).read_bytes()).decode() for name in record["images"]]
        uris = [f"data:image/png;base64,{text}" for text in encoded]
        lines.append(json.dumps({**record, "images": uris}) + "\n")
    path.write_text("".join(lines))
    return path


def as_parts(folder: Path) -> Path:
    """OpenAI messages whose parts name their images."""
    path = folder / "s.jsonl"
    lines = []
    for i, record in enumerate(records(folder)):
        urls = [{"type": "image_url", "image_url": {"url": name}} for name in record["images"]]
        user = {"role": "user", "content": [*urls, {"type": "text", "text": "Which?"}]}
        messages = [user, {"role": "assistant", "content": f"number {i}"}]
        lines.append(json.dumps({"id": f"s{i}", "messages": messages}) + "\n")
    path.write_text("".join(lines))
    return path


def as_llava(folder: Path) -> Path:
    """`image` as one name, a list, or absent."""
    path = folder / "s.jsonl"
    lines = []
    for record in records(folder):
        names = record.pop("images")
        more = {} if not names else {"image": names[0] if len(names) == 1 else names}
        lines.append(json.dumps({**record, **more}) + "\n")
    path.write_text("".join(lines))
    return path


def as_parquet(folder: Path) -> Path:
    """Two files with embedded bytes, as the datasets library writes them."""
    target = folder / "parquet"
    target.mkdir()
    rows = [
        {**r, "images": [{"bytes": (folder / name).read_bytes(), "path": name} for name in r["images"]]}
        for r in records(folder)
    ]
    for name, part in (("a", rows[:2]), ("b", rows[2:])):
        pq.write_table(pa.Table.from_pylist(part), target / f"{name}.parquet", row_group_size=2)
    return target


def as_tars(folder: Path, sample: Callable[[Path, dict[str, Any]], dict[str, bytes]]) -> Path:
    """A WebDataset of two shards."""
    target = folder / "wds"
    target.mkdir()
    everything = records(folder)
    for shard, part in enumerate((everything[:3], everything[3:])):
        with tarfile.open(target / f"pretrain-{shard}.tar", "w") as tar:
            for record in part:
                for suffix, data in sample(folder, record).items():
                    member = tarfile.TarInfo(f"{record['id']}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return target


def as_energon(folder: Path) -> Path:
    """Images as files of the sample, and energon's description of the splits."""

    def sample(folder: Path, record: dict[str, Any]) -> dict[str, bytes]:
        files = {f"{k}.png": (folder / name).read_bytes() for k, name in enumerate(record["images"])}
        return {**files, "json": json.dumps(record["conversations"]).encode()}

    target = as_tars(folder, sample)
    (target / ".nv-meta").mkdir()
    split = 'split_parts:\n  train:\n  - "pretrain-{0..1}.tar"\n  val: []\n'
    (target / ".nv-meta" / "split.yaml").write_text(split)
    return target


def as_flagscale(folder: Path) -> Path:
    """FlagScale's converter: `jpgs` is a pickled list of names, relative to data.media_root."""

    def sample(folder: Path, record: dict[str, Any]) -> dict[str, bytes]:
        conversation = {"conversations": record["conversations"], "second_per_grid_ts": []}
        return {
            "jpgs": pickle.dumps(record["images"]), "videos": pickle.dumps([]),
            "json": json.dumps(conversation).encode(),
        }  # fmt: skip

    return as_tars(folder, sample)


FORMS = {
    "jsonl": as_jsonl, "json": as_json, "data uris": as_data_uris, "openai parts": as_parts, "llava": as_llava,
    "parquet": as_parquet, "energon": as_energon, "flagscale": as_flagscale,
}  # fmt: skip


def contents(corpus: Corpus) -> list[tuple[Any, ...]]:
    """Tokens, placements and pixels of every sample."""
    found = []
    for i in range(len(corpus)):
        record, encoded = corpus.record(i), corpus.read(i).encoded
        wanted = [(item.media, item.frame, (item.grid_h, item.grid_w)) for item in encoded.placements]
        pixels = corpus.pixels(i, record, wanted)
        found.append((record.id, encoded.tokens_T.tolist(), encoded.placements, pixels))
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    return contents(Corpus.open(make_config(as_jsonl(tmp_path_factory.mktemp("jsonl"))), "train"))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_samples(tmp_path: Path, form: str, expected: list[tuple[Any, ...]]) -> None:
    path = FORMS[form](tmp_path)
    root = str(tmp_path) if form == "flagscale" else None
    corpus = Corpus.open(make_config(path, media_root=root), "train")
    found = contents(corpus)
    assert [sample[:3] for sample in found] == [sample[:3] for sample in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine[3], theirs[3], strict=True))
    again = Corpus.open(make_config(path, media_root=root), "train")  # from the index that is there
    assert again.read(COUNT - 1).encoded.tokens_T.tolist() == expected[-1][1]


def test_reading_a_text_leaves_embedded_images_alone(tmp_path: Path) -> None:
    """A record costs its text; each medium is read when it is loaded, without the others."""
    for folder, form in (("p", as_parquet), ("e", as_energon)):
        (tmp_path / folder).mkdir()
        store = open_store(form(tmp_path / folder), "train")
        if isinstance(store, ParquetStore):
            store.attach(tmp_path / "rows")
        locator = list(store.locators())[2]
        record = store.record(locator)
        sizes = [(tmp_path / folder / f"2-{k}.png").stat().st_size for k in range(2)]
        assert [len(media.load()) for media in record.media if media.load] == sizes
        assert 0 < record.num_bytes < 4000 < sum(sizes)


def test_text_corpora_are_learned_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')
    corpus = Corpus.open(make_config(tmp_path / "t.jsonl"), "train")
    encoded = corpus.read(0).encoded
    assert encoded.tokens_T.tolist()[-1] == corpus.pad, "a document ends with <|endoftext|>"
    assert len(encoded.tokens_T) == corpus.num_tokens(0) == len("one two") + 1
    assert (corpus.num_loss_tokens([0]), corpus.num_mtp_loss_tokens([0])) == (7, 6)


def test_captions_beside_images_are_answers(tmp_path: Path) -> None:
    def sample(folder: Path, record: dict[str, Any]) -> dict[str, bytes]:
        save_image(folder / "x.png", 64, 64)
        return {"png": (folder / "x.png").read_bytes(), "txt": f"a {record['id']}".encode()}

    corpus = Corpus.open(make_config(as_tars(tmp_path, sample)), "train")
    assert corpus.record(1).turns[-1].parts == ("a s1",)


def test_captions_of_videos_and_documents_in_tar_files(tmp_path: Path) -> None:
    def sample(folder: Path, record: dict[str, Any]) -> dict[str, bytes]:
        return {"txt": b" a cat"} if record["id"] == "s0" else {"txt": b"a dog", "mp4": b"", "png": b""}

    target = as_tars(tmp_path, sample)
    store = TarStore(target, shards(target, "train"))
    document, captioned = (store.record(locator) for locator in list(store.locators())[:2])
    assert [(turn.role, turn.parts) for turn in document.turns] == [("text", (" a cat",))]
    assert [media.name for media in captioned.media] == ["png", "mp4"]
    assert captioned.turns[-1].parts == ("a dog",)


def test_an_image_and_its_caption_in_columns(tmp_path: Path) -> None:
    """As image folders come from the datasets library."""
    image = {"bytes": (tmp_path / save_image(tmp_path / "a.png", 64, 64)).read_bytes(), "path": "a.png"}
    pq.write_table(pa.Table.from_pylist([{"image": image, "text": "a cat"}]), tmp_path / "s.parquet")
    corpus = Corpus.open(make_config(tmp_path / "s.parquet"), "train")
    assert len(corpus.placements(0)) == 1
    assert corpus.num_loss_tokens([0]) == len("a cat") + 1, "the caption and the end of the turn"


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_energon_leaves_out_what_it_excludes(tmp_path: Path, suffix: str) -> None:
    target = as_energon(tmp_path)
    (target / ".nv-meta" / "split.yaml").unlink()
    split = target / ".nv-meta" / f"split.{suffix}"
    parts = {"train": ["pretrain-{0..1}.tar"], "val": []}
    split.write_text(json.dumps({"split_parts": parts, "exclude": ["pretrain-{1..3}.tar"]}))
    assert shards(target, "train") == (target / "pretrain-0.tar",)
    split.write_text(json.dumps({"split_parts": parts, "exclude": ["pretrain-0.tar/3"]}))
    with pytest.raises(UserError, match=r"excludes pretrain-0\.tar/3"):
        shards(target, "train")
    split.write_text("[]")
    with pytest.raises(UserError, match="no readable split_parts"):
        shards(target, "train")


def test_pickles_hold_plain_lists_only(tmp_path: Path) -> None:
    """A pickle that would call something is refused before it does."""
    evil = pickle.dumps(Path("x"))
    target = as_tars(tmp_path, lambda folder, record: {"jpgs": evil, "json": b"[]"})
    store = TarStore(target, shards(target, "train"))
    with pytest.raises(SampleError, match="no pickled list of names or bytes"):
        store.record(next(iter(store.locators())))


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda f: f / "none.jsonl", "No such file"),
        (lambda f: f, "holds no .tar or .parquet"),
        (lambda f: (f / "x.json").write_text('[{"text": "a"}, {]') and f / "x.json", "not a valid JSON list"),
        (lambda f: (f / "x.parquet").write_bytes(b"PAR1") and f / "x.parquet", "no readable Parquet"),
        (lambda f: (f / "x.tar").write_bytes(b"x" * 2000) and f, "not a readable tar file"),
    ],
)
def test_sources_that_are_damaged_as_a_whole_are_named(
    tmp_path: Path, make: Callable[[Path], Path], cause: str
) -> None:
    with pytest.raises(UserError, match=cause):
        Corpus.open(make_config(make(tmp_path)), "train")


def test_names() -> None:
    assert expand_braces("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert expand_braces("{x,y}/b-{0..1}") == ["x/b-0", "x/b-1", "y/b-0", "y/b-1"]
    assert expand_braces("plain.tar") == ["plain.tar"]
    assert split_key("a.b/c.0.JPG") == ("a.b/c", "0.jpg")
