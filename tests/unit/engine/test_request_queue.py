"""Who waits first: the highest priority, then who came first, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.scheduler import NUM_LOOKED_AT, RequestQueue
from engine.testing.fake_model import FakeModel

Make = Callable[..., Any]


class _Waiting:
    """As much of a sequence as a line looks at."""

    def __init__(self, number: int, priority: int) -> None:
        self.key = (str(number), 0)
        self.request = self
        self.priority = priority
        self.number = number


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans())), st.booleans(), st.integers(0, 9))
def test_a_line_is_a_sorted_list(
    comings: list[tuple[int, bool]], has_priorities: bool, num: int
) -> None:
    line, model = RequestQueue(has_priorities=has_priorities), []
    for number, (priority, leaves) in enumerate(comings):
        one: Any = _Waiting(number, priority)
        line.add(one)
        model.append(one)
        if leaves:
            gone = model.pop(number % len(model))
            assert line.pop(gone.key) is gone
            assert line.pop(gone.key) is None
    model.sort(key=lambda one: (-one.priority if has_priorities else 0, one.number))
    assert list(line.first(num)) == model[:num]
    assert len(line) == len(model) and {key for key, _ in line.items()} == {
        one.key for one in model
    }
    assert all(one.key in line and line[one.key] is one for one in model)


def test_a_higher_priority_passes_any_backlog(make_request: Make) -> None:
    config = EngineConfig(num_blocks=64, max_num_tokens_per_step=16, max_num_running=2)
    engine = LLMEngine(config, FakeModel())
    for number in range(NUM_LOOKED_AT + 50):
        engine.submit(make_request(str(number), (1, 2), max_tokens=2))
    engine.step()
    engine.submit(make_request("urgent", (1, 2), max_tokens=2, priority=5))
    names = [event.request_id for _ in range(3) for event in engine.step().events]
    assert "urgent" in names
