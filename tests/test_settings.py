"""Settings: the public table, what parses, and errors that help."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_dsv4_graphs.settings import Settings, SettingsError, strict_requested, unknown_names

# Names and defaults are public: changing one here is changing the interface.
DEFAULTS = {
    "SGLANG_DSV4_GRAPHS": True,
    "SGLANG_DSV4_GRAPHS_STRICT": False,
    "SGLANG_DSV4_GRAPHS_ALLOW_UNTESTED_ENGINE": False,
    "SGLANG_DSV4_FULL_LAYER_GRAPH_MAX_TOKENS": -1,
    "SGLANG_DSV4_DECODER_REPLAY_GRAPH_MAX_ROWS": 2048,
    "SGLANG_DSV4_EAGER_GRAPH_GLOBAL_POOL": True,
    "SGLANG_DSV4_EAGER_GRAPH_LEAN_BREAKS": True,
    "SGLANG_DSV4_EAGER_GRAPH_MERGED_KV_STORE": True,
    "SGLANG_DSV4_DECODER_REPLAY_GRAPH_DEBUG": False,
    "SGLANG_DSV4_GRAPHS_SHADOW": 0,
}
FLAGS = [name for name, default in DEFAULTS.items() if isinstance(default, bool)]
NUMBERS = {
    "SGLANG_DSV4_FULL_LAYER_GRAPH_MAX_TOKENS": -1,
    "SGLANG_DSV4_DECODER_REPLAY_GRAPH_MAX_ROWS": 0,
    "SGLANG_DSV4_GRAPHS_SHADOW": 0,
}


def by_name(settings: Settings) -> dict[str, object]:
    return {f.metadata["name"]: getattr(settings, f.name) for f in dataclasses.fields(settings)}


def test_names_and_defaults_are_the_public_ones() -> None:
    assert by_name(Settings.read({})) == DEFAULTS
    assert Settings.names() == list(DEFAULTS)
    assert {name: type(value) for name, value in by_name(Settings.read({})).items()} == {
        name: type(value) for name, value in DEFAULTS.items()
    }


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    for text, value in (("1", True), ("0", False), (" TRUE ", True), ("off", False), ("Yes", True), ("no", False)):
        assert by_name(Settings.read({name: text})) == {**DEFAULTS, name: value}
    for text in ("2", "-1", "maybe", "1.0"):
        with pytest.raises(SettingsError, match=f"{name}='{text}' is not allowed: give 0 or 1"):
            Settings.read({name: text})


@pytest.mark.parametrize(("name", "least"), NUMBERS.items())
def test_numbers(name: str, least: int) -> None:
    for value in (least, least + 1, 4096):
        assert by_name(Settings.read({name: f" {value} "})) == {**DEFAULTS, name: value}
    for text in (str(least - 1), "many", "1.5", "0x10"):
        with pytest.raises(SettingsError, match=f"{name}='{text}' is not allowed: give .*number of"):
            Settings.read({name: text})


@pytest.mark.parametrize("text", ["", "  "])
@pytest.mark.parametrize("name", DEFAULTS)
def test_an_empty_value_is_the_default(name: str, text: str) -> None:
    assert by_name(Settings.read({name: text})) == DEFAULTS


def test_one_error_names_every_bad_variable() -> None:
    environ = {"SGLANG_DSV4_GRAPHS_SHADOW": "-3", "SGLANG_DSV4_GRAPHS": "x", "SGLANG_DSV4_GRAPHS_STRICT": "1"}
    with pytest.raises(SettingsError) as caught:
        Settings.read(environ)
    text = str(caught.value)
    assert "SGLANG_DSV4_GRAPHS_SHADOW='-3'" in text
    assert "SGLANG_DSV4_GRAPHS='x'" in text
    assert "STRICT" not in text


def test_read_from_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSV4_GRAPHS_SHADOW", "7")
    monkeypatch.setenv("SGLANG_DSV4_GRAPHS_STRICT", "1")
    monkeypatch.setenv("SGLANG_DSV4_GRAPHS_SHADDOW", "7")
    assert Settings.read().shadow == 7
    assert strict_requested()
    assert unknown_names() == {"SGLANG_DSV4_GRAPHS_SHADDOW": "SGLANG_DSV4_GRAPHS_SHADOW"}


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().strict = True  # type: ignore[misc]


def test_every_setting_is_explained() -> None:
    assert all(f.metadata["what"] and f.metadata["allowed"] for f in dataclasses.fields(Settings))


@pytest.mark.parametrize(
    ("text", "wanted"), [("1", True), ("true", True), ("0", False), ("", False), ("perhaps", False)]
)
def test_strict_is_known_when_another_setting_is_bad(text: str, wanted: bool) -> None:
    environ = {"SGLANG_DSV4_GRAPHS_STRICT": text, "SGLANG_DSV4_GRAPHS_SHADOW": "bad"}
    assert strict_requested(environ) is wanted
    assert not strict_requested({})


def test_unknown_names_come_with_the_nearest_known() -> None:
    environ = {
        **dict.fromkeys(DEFAULTS, "1"),
        "SGLANG_DSV4_GRAPHS_STRIKT": "1",
        "SGLANG_DSV4_GRAPHS_ALLOW_UNTESTED": "1",
        "SGLANG_DSV4_GRAPHS_" + "Q" * 60: "1",
        "SGLANG_DSV4_GRAPH": "0",
        "SGLANG_DSV4_FULL_LAYER_GRAPH_MAX_TOKEN": "0",
        "SGLANG_DSV4_DECODER_REPLAY_GRAPH_MAX_TOKENS": "0",
        "SGLANG_DSV4_EAGER_GRAPHS_LEAN_BREAKS": "0",
        "SGLANG_DSV4_OTHER": "not ours",
        "SGLANG_DSV4_DECODER_TAIL_GRAPH_MAX_ROWS": "the engine's",
        "HOME": "/",
    }
    assert unknown_names(environ) == {
        "SGLANG_DSV4_GRAPHS_ALLOW_UNTESTED": "SGLANG_DSV4_GRAPHS_ALLOW_UNTESTED_ENGINE",
        "SGLANG_DSV4_GRAPH": "SGLANG_DSV4_GRAPHS",
        "SGLANG_DSV4_FULL_LAYER_GRAPH_MAX_TOKEN": "SGLANG_DSV4_FULL_LAYER_GRAPH_MAX_TOKENS",
        "SGLANG_DSV4_DECODER_REPLAY_GRAPH_MAX_TOKENS": "SGLANG_DSV4_DECODER_REPLAY_GRAPH_MAX_ROWS",
        "SGLANG_DSV4_EAGER_GRAPHS_LEAN_BREAKS": "SGLANG_DSV4_EAGER_GRAPH_LEAN_BREAKS",
        "SGLANG_DSV4_GRAPHS_STRIKT": "SGLANG_DSV4_GRAPHS_STRICT",
        "SGLANG_DSV4_GRAPHS_" + "Q" * 60: None,
    }
