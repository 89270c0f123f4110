"""When the demo counts as shown: equal texts, whole loads, and from the node they should come from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.demo.result import COLD, HITS, HOT, REFILL, REMOTE, Result, Run

WHOLE = 4000


def run(name: str) -> Run:
    loaded = WHOLE if name in HITS else 0
    pulled = loaded if name in (REMOTE, REFILL) else 0
    return Run(name, "A", 1, "", 4010, loaded, pulled, WHOLE, 0.5, "text", True)


def result(**changes: Run) -> Result:
    runs = tuple(changes.get(name.replace(" ", "_"), run(name)) for name in (COLD, HOT, *HITS))
    return Result("model", 32, 3969, "nixl", 5.0, ("text", "other"), runs, 60.0)


def test_what_is_promised() -> None:
    good = result()
    assert good.ok
    assert good.loaded_share == 1


@pytest.mark.parametrize("name", HITS)
def test_every_hit_has_to_load_nearly_all(name: str) -> None:
    word = name.replace(" ", "_")
    assert result(**{word: replace(run(name), loaded_tokens=3840)}).ok
    short = result(**{word: replace(run(name), loaded_tokens=3776)})
    assert not short.ok
    assert short.to_json()["loaded_tokens"] == 3776


@pytest.mark.parametrize("name", [COLD, HOT, *HITS])
def test_every_text_has_to_be_equal(name: str) -> None:
    bad = result(**{name.replace(" ", "_"): replace(run(name), text_equal=False)})
    assert not bad.ok
    assert bad.to_json()["texts_equal"] is False


@pytest.mark.parametrize("name", [REMOTE, REFILL])
def test_what_was_there_already_does_not_show_another_node(name: str) -> None:
    assert not result(**{name.replace(" ", "_"): replace(run(name), pulled_tokens=0)}).ok


def test_the_json_has_a_time_for_every_run() -> None:
    names = ("cold", "engine_hot", "local_hit", "restart_hit", "remote_hit", "replica_hit", "refill_hit")
    json = result().to_json()
    assert {name for name in json if name.endswith("_ttft_s")} == {
        f"{name}_ttft_s" for name in (*names, "reference")
    }
    assert {"prompt_tokens", "loaded_tokens", "texts_equal"} <= json.keys()
