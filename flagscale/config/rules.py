"""Rules about fields alone, before the world size is looked at: one small function a rule.

A rule takes the configuration and yields a `ConfigError` for each violation; the list `RULES` at the end runs them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from flagscale.config.errors import ConfigError, UserError
from flagscale.config.expert_rules import EXPERT_RULES
from flagscale.config.launch_rules import LAUNCH_RULES
from flagscale.config.mix import sources_are_complete
from flagscale.config.schema import Config

Rule = Callable[[Config], Iterator[UserError]]
DATA_FILES = ("*.tar", "*.parquet", "*/*.tar", "*/*.parquet")


def query_groups_divide_heads(config: Config) -> Iterator[ConfigError]:
    """Every key/value head serves the same number of query heads."""
    heads, groups = config.model.num_attention_heads, config.model.num_query_groups
    if heads % groups:
        yield ConfigError(
            "model.num_query_groups",
            groups,
            f"must divide num_attention_heads {heads}",
            _divisors_remedy(heads, groups),
        )


def gdn_key_heads_divide_value_heads(config: Config) -> Iterator[ConfigError]:
    """Every Gated DeltaNet key head serves the same number of value heads."""
    keys, values = config.model.linear_num_key_heads, config.model.linear_num_value_heads
    if values % keys:
        yield ConfigError(
            "model.linear_num_value_heads",
            values,
            f"must be a multiple of linear_num_key_heads {keys}",
            f"use {max(1, values // keys) * keys} or {(values // keys + 1) * keys}",
        )


def attention_interval_divides_layers(config: Config) -> Iterator[ConfigError]:
    """The last layer of the decoder is a full-attention layer, as in every Qwen3.5."""
    layers, interval = config.model.num_layers, config.model.full_attention_interval
    if layers % interval:
        yield ConfigError(
            "model.num_layers",
            layers,
            f"must be a multiple of full_attention_interval {interval}",
            f"use {max(1, layers // interval) * interval} or {(layers // interval + 1) * interval}",
        )


def mrope_sections_fill_rotary_channels(config: Config) -> Iterator[ConfigError]:
    """Time, height and width share the rotary frequencies, a frequency for two rotated channels."""
    model = config.model
    rotary = model.kv_channels * model.rotary_percent
    if model.rotary_percent > 1 or rotary < 2 or rotary % 2:
        yield ConfigError(
            "model.rotary_percent",
            model.rotary_percent,
            f"must rotate an even number of the kv_channels {model.kv_channels}, not {rotary:g}",
            f"use a multiple of {2 / model.kv_channels:g} up to 1",
        )
    elif len(model.mrope_section) != 3 or min(model.mrope_section) < 0 or sum(model.mrope_section) != rotary / 2:
        yield ConfigError(
            "model.mrope_section",
            model.mrope_section,
            f"must be three numbers with the sum kv_channels * rotary_percent / 2 = {rotary / 2:g}, "
            f"not {len(model.mrope_section)} with the sum {sum(model.mrope_section)}",
            "change the sections, kv_channels or rotary_percent",
        )


def mrope_sections_interleave(config: Config) -> Iterator[ConfigError]:
    """Height takes the frequencies 1, 4, 7, .. and width 2, 5, 8, ..: there must be as many of them."""
    sections = config.model.mrope_section
    total = sum(sections)
    if len(sections) != 3:
        return  # reported by mrope_sections_fill_rotary_channels
    for axis, share in enumerate(sections[1:], start=1):
        room = len(range(axis, total, 3))
        if share > room:
            yield ConfigError(
                "model.mrope_section",
                sections,
                f"entry {axis} is {share}, but only {room} of {total} interleaved frequencies are free for it",
                "give the difference to the first entry",
            )


def vision_heads_divide_width(config: Config) -> Iterator[ConfigError]:
    """A vision head rotates half of its channels by row and half by column, in pairs: its width is a multiple of 4."""
    width, heads = config.model.vision_hidden_size, config.model.vision_num_attention_heads
    if width % (4 * heads):
        yield ConfigError(
            "model.vision_hidden_size",
            width,
            f"must be a multiple of 4 * vision_num_attention_heads = {4 * heads}",
            f"use {max(1, width // (4 * heads)) * 4 * heads} or {(width // (4 * heads) + 1) * 4 * heads}",
        )


def position_table_is_square(config: Config) -> Iterator[ConfigError]:
    """The learned position table is a square of rows and columns."""
    rows = config.model.vision_num_position_embeddings
    side = math.isqrt(rows)
    if side * side != rows:
        yield ConfigError(
            "model.vision_num_position_embeddings",
            rows,
            "must be a square number",
            f"use {side**2} or {(side + 1) ** 2}",
        )


def one_mtp_layer(config: Config) -> Iterator[ConfigError]:
    """Qwen3.5 has at most one multi-token-prediction layer."""
    if config.model.mtp_num_layers > 1:
        yield ConfigError("model.mtp_num_layers", config.model.mtp_num_layers, "must be 0 or 1", "use 0 or 1")


def token_ids_are_in_the_vocabulary(config: Config) -> Iterator[ConfigError]:
    """Special tokens have rows of their own in the embedding table."""
    model = config.model
    seen: dict[int, str] = {}
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        value = getattr(model, name)
        if value >= model.vocab_size:
            yield ConfigError(
                f"model.{name}", value, f"must be below vocab_size {model.vocab_size}", "take the id from the tokenizer"
            )
        elif value in seen:
            yield ConfigError(
                f"model.{name}", value, f"is also {seen[value]}", "give each special token an id of its own"
            )
        seen.setdefault(value, name)


def sequence_fits_the_model(config: Config) -> Iterator[ConfigError]:
    """Positions up to `seq_length` must be known to the model."""
    model = config.model
    if model.seq_length > model.max_position_embeddings:
        yield ConfigError(
            "model.seq_length",
            model.seq_length,
            f"must be at most max_position_embeddings {model.max_position_embeddings}",
            "shorten the sequence or use a model made for more positions",
        )


def pixel_bounds_are_ordered(config: Config) -> Iterator[ConfigError]:
    """The smallest image is not larger than the largest."""
    data = config.data
    if data.min_pixels > data.max_pixels:
        yield ConfigError(
            "data.min_pixels",
            data.min_pixels,
            f"must be at most max_pixels {data.max_pixels}",
            "lower min_pixels or raise max_pixels",
        )


def video_frames_are_ordered(config: Config) -> Iterator[ConfigError]:
    """The fewest frames of a video are not more than the most."""
    data = config.data
    if data.video_min_frames > data.video_max_frames:
        yield ConfigError(
            "data.video_min_frames",
            data.video_min_frames,
            f"must be at most video_max_frames {data.video_max_frames}",
            "lower it or raise video_max_frames",
        )


def largest_image_is_a_token(config: Config) -> Iterator[ConfigError]:
    """An image has at least one merged patch."""
    side = config.model.vision_patch_size * config.model.vision_spatial_merge_size
    if config.data.max_pixels < side * side:
        yield ConfigError(
            "data.max_pixels",
            config.data.max_pixels,
            f"must be at least {side * side}, the area of one token (patch {config.model.vision_patch_size} x merge "
            f"{config.model.vision_spatial_merge_size}, squared)",
            f"use {side * side} or more",
        )


def workers_have_work(config: Config) -> Iterator[ConfigError]:
    """Every process that reads ahead has a macro batch to keep ready."""
    workers, prefetch = config.data.workers, config.data.prefetch
    if workers > prefetch:
        remedy = f"use {prefetch} or fewer, or raise prefetch" if prefetch else "use 0, or raise prefetch"
        nothing = "" if prefetch else ", which reads nothing ahead"
        yield ConfigError("data.workers", workers, f"must be at most prefetch {prefetch}{nothing}", remedy)


def learning_rates_are_ordered(config: Config) -> Iterator[ConfigError]:
    """The decay goes down, and the betas are shares below 1."""
    optimizer = config.model.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield ConfigError(
            "model.optimizer.min_lr", optimizer.min_lr, f"must be at most lr {optimizer.lr:g}", "lower it or raise lr"
        )
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(optimizer, name) >= 1:
            value = getattr(optimizer, name)
            yield ConfigError(f"model.optimizer.{name}", value, "must be below 1", "use a value such as 0.9")


def warmup_ends_before_the_decay(config: Config) -> Iterator[ConfigError]:
    """The learning rate has to reach its peak before its decay ends."""
    warmup, decay = config.model.optimizer.lr_warmup_iters, config.model.optimizer.lr_decay_iters
    if decay is not None and warmup >= decay:
        yield ConfigError(
            "model.optimizer.lr_warmup_iters",
            warmup,
            f"must be below lr_decay_iters {decay}",
            "shorten the warm-up or decay for longer",
        )


def something_is_trained(config: Config) -> Iterator[ConfigError]:
    """At least one part of the model is not frozen."""
    model = config.model
    if model.freeze_vision and model.freeze_merger and model.freeze_language:
        yield ConfigError(
            "model.freeze_language",
            True,
            "leaves nothing to train, freeze_vision and freeze_merger are set too",
            "free one",
        )


def validation_has_data(config: Config) -> Iterator[ConfigError]:
    """Validation needs a data file."""
    if config.model.eval_interval is not None and config.data.valid_path is None:
        yield ConfigError(
            "model.eval_interval",
            config.model.eval_interval,
            "asks for validation, but data.valid_path is null",
            "set data.valid_path, or eval_interval to null",
        )


def tokenizer_folder_is_given(config: Config) -> Iterator[ConfigError]:
    """A Hugging Face tokenizer comes from a folder."""
    tokenizer = config.data.tokenizer
    if tokenizer.type == "hf" and tokenizer.path is None:
        yield ConfigError(
            "data.tokenizer.path", None, "must be set for tokenizer.type hf", "give the tokenizer's folder"
        )
    if tokenizer.type == "hf" and tokenizer.path is not None and not Path(tokenizer.path).is_dir():
        yield ConfigError("data.tokenizer.path", tokenizer.path, "is no folder", "give the folder of a saved tokenizer")


def files_exist(config: Config) -> Iterator[ConfigError]:
    """Entrypoint and data are there and can be read; a folder of data holds Parquet or WebDataset files."""
    entrypoint = config.experiment.task.entrypoint
    if not Path(entrypoint).is_file():
        kind = "is a folder, not a file" if Path(entrypoint).is_dir() else "is no file"
        yield ConfigError("experiment.task.entrypoint", entrypoint, kind, "name the script that trains")
    yield from _unusable("experiment.task.entrypoint", entrypoint)
    data = config.data
    paths = {"data.valid_path": data.valid_path}
    if data.sources:
        entries = ((name, entry) for name, entry in data.sources.items() if isinstance(entry, dict))
        paths |= {f"data.sources.{name}.path": entry.get("path") for name, entry in entries}
    else:
        paths["data.train_path"] = data.train_path
    for home, path in paths.items():
        if path is None:
            continue
        yield from _unusable(home, path)
        if Path(path).is_file():
            continue
        if not Path(path).is_dir():
            yield ConfigError(
                home, path, "is no file", "correct the path; `python tools/data/make_digits.py` writes the demo's data"
            )
        elif not any(next(Path(path).glob(pattern), None) for pattern in DATA_FILES):
            yield ConfigError(home, path, "is a folder without .tar or .parquet files", "name the file of samples")
    if data.media_root is not None and not Path(data.media_root).is_dir():
        yield ConfigError("data.media_root", data.media_root, "is no folder", "name the folder of images and videos")


def _unusable(home: str, path: str) -> Iterator[ConfigError]:
    """What is there but of no use."""
    if Path(path).exists() and not os.access(path, os.R_OK):
        yield ConfigError(home, path, "may not be read by you", "change its permissions (chmod +r), or name another")
    elif Path(path).is_file() and not Path(path).stat().st_size:
        yield ConfigError(home, path, "is an empty file", "name another, or write it anew")


def written_folders_can_be_folders(config: Config) -> Iterator[ConfigError]:
    """No part of a path that is written to is a file."""
    folders = {"experiment.exp_dir": config.experiment.exp_dir, "data.cache_path": config.data.cache_path}
    for home, folder in folders.items():
        if folder is None:
            continue
        place = next((place for place in (Path(folder), *Path(folder).parents) if place.exists()), None)
        if place is not None and not place.is_dir():
            yield ConfigError(home, folder, f"{place} is a file, not a folder", "choose another")


RULES: tuple[Rule, ...] = (
    query_groups_divide_heads,
    gdn_key_heads_divide_value_heads,
    attention_interval_divides_layers,
    mrope_sections_fill_rotary_channels,
    mrope_sections_interleave,
    vision_heads_divide_width,
    position_table_is_square,
    one_mtp_layer,
    token_ids_are_in_the_vocabulary,
    sequence_fits_the_model,
    pixel_bounds_are_ordered,
    largest_image_is_a_token,
    learning_rates_are_ordered,
    warmup_ends_before_the_decay,
    something_is_trained,
    validation_has_data,
    tokenizer_folder_is_given,
    files_exist,
    sources_are_complete,
    video_frames_are_ordered,
    workers_have_work,
    written_folders_can_be_folders,
    *EXPERT_RULES,
    *LAUNCH_RULES,
)


def field_errors(config: Config) -> list[UserError]:
    """Violations of all rules about fields alone."""
    return [error for rule in RULES for error in rule(config)]


def _divisors_remedy(number: int, near: int) -> str:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return f"use {' or '.join(str(n) for n in sorted(sorted(divisors, key=lambda n: abs(n - near))[:2]))}"
