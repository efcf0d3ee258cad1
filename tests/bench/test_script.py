"""What simulated callers make the model decide."""

from __future__ import annotations

import pytest

from antiphon.bench.script import Talk, script_of
from antiphon.core.duplex import DuplexConfig, UnitDecisions
from antiphon.errors import ConfigError
from antiphon.models.minicpmo.source import ModelSize, RandomWeights

TOKENIZER = RandomWeights(ModelSize.TINY).tokenizer()


def lived(talk: Talk, session: int, num_sessions: int, num_units: int) -> list[tuple[int, bool]]:
    """Spoken tokens of each unit, and whether its turn ended in it, as the rules of a call take the script."""
    duplex, script = TOKENIZER.special.duplex, script_of(talk, session, num_sessions, TOKENIZER)
    units: list[tuple[int, bool]] = []
    is_open, counter = False, 0
    for _ in range(num_units):
        decisions = UnitDecisions(duplex, DuplexConfig(), is_turn_open=is_open, is_forced_listen=False)
        while not decisions.is_done:
            decisions.take(script[counter % len(script)])
            counter += 1
        said = decisions.utterances()
        assert len(said) <= 1
        num_words = sum(token != duplex.turn_eos for one in said for token in one.token_ids)
        units.append((num_words, any(one.ends_turn for one in said)))
        is_open = decisions.is_turn_open
    return units


def test_a_script_speaks_so_many_units_ends_its_turn_and_listens() -> None:
    talk = Talk(speaking_share=0.5, turn_units=3, unit_words=8)
    assert lived(talk, 0, 1, 12) == 2 * [(8, False), (8, False), (8, True), (0, False), (0, False), (0, False)]


def test_with_the_whole_share_one_turn_follows_the_other() -> None:
    assert lived(Talk(1.0, 2, 4), 0, 1, 4) == 2 * [(4, False), (4, True)]


def test_without_a_share_nobody_speaks() -> None:
    assert lived(Talk(0.0, 5, 8), 0, 1, 5) == 5 * [(0, False)]


@pytest.mark.parametrize(("share", "num_sessions"), [(0.5, 32), (0.5, 7), (0.25, 40), (0.8, 10)])
def test_at_any_time_as_many_speak_as_the_share_says(share: float, num_sessions: int) -> None:
    talk = Talk(share, 4, 8)
    units = [lived(talk, session, num_sessions, 40) for session in range(num_sessions)]
    for unit in range(20, 40):
        num_speaking = sum(session[unit][0] > 0 for session in units)
        assert abs(num_speaking - share * num_sessions) <= 1


def test_a_unit_that_is_too_full_or_a_share_that_is_none_is_refused() -> None:
    limit = DuplexConfig().max_decided_tokens
    with pytest.raises(ConfigError, match="spoken tokens"):
        Talk(0.5, 4, limit - 3)
    Talk(0.5, 4, limit - 4)
    with pytest.raises(ConfigError, match="share"):
        Talk(1.5, 4, 8)


def test_the_fullest_unit_still_ends_as_its_script_says() -> None:
    words = DuplexConfig().max_decided_tokens - 4
    assert lived(Talk(0.5, 2, words), 0, 1, 8) == 2 * [(words, False), (words, True), (0, False), (0, False)]
