from __future__ import annotations

from pathlib import Path

import pytest

from lapclip.config import Layer, build_config, parse_settings, read_recipe, recipe_names
from lapclip.errors import ConfigError
from lapclip.model.shapes import SHAPES


def config_of(*settings: str, recipe: str = "first-run"):
    return build_config([read_recipe(recipe), parse_settings(list(settings))], SHAPES)


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_is_valid_and_opens_with_its_command(recipe: str) -> None:
    config_of(recipe=recipe)
    from lapclip.config import RECIPES

    first = (RECIPES / f"{recipe}.toml").read_text().splitlines()[0]
    assert first.startswith("# lapclip train")
    assert f"--recipe {recipe}" in first or recipe in (
        "first-run",
        "photos",
    )  # those are chosen by themselves


def test_the_seed_recipe_is_the_published_one() -> None:
    config = config_of(recipe="seed")
    assert config.model == SHAPES["seed"]
    assert config.data.train_pairs == 216
    train = config.train
    assert (train.batch_size, train.learning_rate, train.weight_decay, train.epochs) == (
        12,
        3e-4,
        0.01,
        15,
    )
    assert train.checkpoint_every_epochs == 5
    gpu = config_of(recipe="seed-gpu")
    assert (gpu.train.batch_size, gpu.train.device) == (16, "accelerator")


def test_settings_win_over_the_recipe_and_the_recipe_over_defaults() -> None:
    config = config_of("train.batch_size=7", "model.patch=8")
    assert config.train.batch_size == 7
    assert config.model.patch == 8
    assert config.train.learning_rate == 8e-4


def test_a_named_model_is_the_base_and_single_fields_change_it() -> None:
    config = config_of("model.name=seed", "model.image_layers=3")
    assert config.model.image_width == 512
    assert config.model.image_layers == 3


def test_a_unique_field_may_stand_alone() -> None:
    assert config_of("dtype=bfloat16").train.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"seed could mean data\.seed or train\.seed"):
        config_of("seed=3")


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("train.liner=torch", "--set train.linear=torch"),
        ("batchsize=12", "--set batch_size=12"),
        ("train.devise=a b", "--set train.device=VALUE"),
        ("xyzzy=1", "a field of docs/settings.md"),
    ],
)
def test_a_misspelt_setting_is_shown_as_it_should_be_typed(setting: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(setting)
    assert error.value.hint == hint


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.lerning_rate=1", r"unknown field\. Did you mean train\.learning_rate"),
        ("batchsize=1", r"Did you mean batch_size"),
        ("train.batch_size=many", r"--set: train\.batch_size must be a whole number, not 'many'"),
        ("train.batch_size=1.5", r"must be a whole number"),
        ("train.batch_size=1", r"must be at least 2"),
        ("train.learning_rate=nan", r"must be a finite number"),
        ("data.source=/photos/\udcff", r"data\.source holds bytes that are no text"),
        ("train.symbol_dropout=2", r"must be at most 0\.9"),
        (
            "train.dtype=float23",
            r"cannot be 'float23'; it is one of auto, float32, bfloat16, float16",
        ),
        ("train.threads=fast", r"cannot be 'fast'"),
        ("train.threads=0", r"must be at least 1"),
        ("train.steps", r"has no value"),
        ("model.name=sed", r"--set: unknown model sed\. Did you mean seed"),
    ],
)
def test_bad_settings_are_named(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(setting)


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Unknown recipe frist-run\. Did you mean first-run"):
        read_recipe("frist-run")


def test_a_recipe_file_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('[train]\nbatch_size = 9\n[model]\nname = "tiny"\n')
    assert config_of(recipe=str(mine)).train.batch_size == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[train]\nbatch = 9\n",
            r"mine\.toml: unknown field train\.batch\. Did you mean batch_size",
        ),
        ("[trian]\nsteps = 9\n", r"mine\.toml: unknown section trian\. Did you mean train"),
        ("train = 9\n", r"mine\.toml: train is a section"),
        ("[train\n", r"mine\.toml is not readable as TOML"),
        ("[model]\npatch = 7\n", r"mine\.toml, --set: model\.patch 7 does not divide"),
    ],
)
def test_a_bad_recipe_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(text)
    with pytest.raises(ConfigError, match=message):
        config_of("model.image_size=64", recipe=str(mine))


def test_a_missing_recipe_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"No such file: none\.toml"):
        read_recipe("none.toml")


def test_errors_say_which_layer_was_wrong() -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: train\.epochs must be at least 1"):
        build_config([Layer("run.toml", {"train": {"epochs": 0}})], SHAPES)


@pytest.mark.parametrize(
    ("field", "text"), [("pixel_mean", "0.5 0.5"), ("pixel_std", "1 1 0"), ("pixel_mean", "a b c")]
)
def test_colours_are_three_numbers(field: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"model.{field} must be three numbers"):
        build_config([parse_settings([f"model.{field}={text}"])], SHAPES)


def test_a_number_that_no_float_can_hold_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(f"[train]\nlearning_rate = {10**400}\n")
    with pytest.raises(ConfigError, match="learning_rate must be a number"):
        build_config([read_recipe(str(recipe))], SHAPES)
