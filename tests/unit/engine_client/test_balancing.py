"""Balancing is arithmetic: no engine is needed to know it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.request import Beam, Sampling
from engine_client.interface import Ask
from engine_client.load_balancing import least_loaded, num_outstanding_tokens

LOADS = st.lists(st.one_of(st.none(), st.integers(0, 50)), max_size=8)


@given(LOADS)
def test_the_least_loaded_alive_and_the_first_of_equals(loads: list[int | None]) -> None:
    rank = least_loaded(loads)
    alive = [load for load in loads if load is not None]
    if not alive:
        assert rank is None
    else:
        assert rank is not None and loads[rank] == min(alive)
        assert min(alive) not in loads[:rank]


def test_outstanding_tokens_count_the_prompt_once_and_each_sample() -> None:
    ask = Ask("a", (1,) * 10, Sampling(max_tokens=5), num_samples=3)
    assert num_outstanding_tokens(ask, 100) == 25
    assert num_outstanding_tokens(ask, 12) == 16, "the window ends before"
    beam = Ask("b", (1,) * 10, Sampling(max_tokens=5), num_samples=1, beam=Beam(4))
    assert num_outstanding_tokens(beam, 100) == 30
