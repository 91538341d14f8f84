"""Who should still have which prompt: by chain hash, bounded, never longer than what was noted."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvstore import block_hash
from services.router.prefixes import PrefixAffinity

ROOT = block_hash.root_key(b"salt", "ab" * 32)


ROOMY = dict.fromkeys(["p", "d", "x", "a", "b", "c", *(f"w{i}" for i in range(6))], 10_000)


def _chain(tokens: list[int], root: bytes = ROOT) -> list[bytes]:
    return block_hash.chain(root, tokens, 16)


def test_the_next_turn_finds_the_last_one() -> None:
    conversations = PrefixAffinity(1000)
    first = _chain(list(range(16 * 5)))
    conversations.note(first, ["p", "d"])
    answer = _chain([*range(16 * 5), *range(16 * 3)])
    conversations.note(answer, ["d"])
    turn = _chain([*range(16 * 5), *range(16 * 3), *range(7, 7 + 16 * 9)])
    assert conversations.find(turn, ROOMY) == {"d": 8, "p": 5}


def test_other_tokens_and_other_tenants_find_nothing() -> None:
    conversations = PrefixAffinity(1000)
    conversations.note(_chain(list(range(160))), ["d"])
    assert conversations.find(_chain(list(range(1, 161))), ROOMY) == {}
    other = block_hash.root_key(b"other salt", "ab" * 32)
    assert conversations.find(_chain(list(range(160)), other), ROOMY) == {}


def test_a_prompt_that_branches_off_is_found_up_to_an_eighth_block() -> None:
    conversations = PrefixAffinity(1000)
    conversations.note(_chain(list(range(16 * 40))), ["d"])
    branch = _chain([*range(16 * 30), *range(5, 5 + 16 * 10)])
    assert conversations.find(branch, ROOMY) == {"d": 24}


def test_the_latest_workers_are_known_and_the_latest_prompts() -> None:
    conversations = PrefixAffinity(3)
    chain = _chain(list(range(16)))
    for number in range(6):
        conversations.note(chain, [f"w{number}"])
        conversations.check_integrity()
    assert conversations.find(chain, ROOMY) == {f"w{number}": 1 for number in (5, 4, 3, 2)}
    for number in range(3):
        conversations.note(_chain([number + 1] * 16), ["x"])
    assert conversations.find(chain, ROOMY) == {}
    conversations.check_integrity()


def test_nobody_is_said_to_have_more_than_was_noted(seed: int, scale: Callable[[int], int]) -> None:
    rng, conversations = random.Random(seed), PrefixAffinity(50)
    noted: dict[str, set[bytes]] = {}
    prompts = [[rng.randrange(3) for _ in range(16 * rng.randint(0, 30))] for _ in range(12)]
    prompts += [prompt[: rng.randrange(len(prompt) + 1)] for prompt in prompts]
    for _ in range(scale(3000)):
        chain = _chain(rng.choice(prompts))
        if rng.random() < 0.5:
            lives = rng.sample(["a", "b", "c"], rng.randint(0, 2))
            conversations.note(chain, lives)
            for life in lives:
                noted.setdefault(life, set()).update(chain)
        found = conversations.find(chain, ROOMY)
        assert len(found) <= 4
        for life, num_blocks in found.items():
            assert 0 < num_blocks <= len(chain)
            assert chain[num_blocks - 1] in noted[life]
        conversations.check_integrity()


def test_a_cache_that_must_have_turned_over_is_not_believed_in() -> None:
    conversations = PrefixAffinity(10_000)
    first = _chain(list(range(16 * 10)))
    conversations.note(first, ["d", "p"])
    assert conversations.find(first, {"d": 100, "p": 100}) == {"d": 10, "p": 10}
    for number in range(10):
        conversations.note(_chain([number + 1] * 160), ["d"])
    assert conversations.find(first, {"d": 100, "p": 100}) == {"d": 10, "p": 10}
    conversations.note(_chain([99] * 160), ["d"])
    assert conversations.find(first, {"d": 100, "p": 100}) == {"p": 10}
    # What is there already takes no room when it is used again.
    for _ in range(20):
        conversations.note(_chain([99] * 160), ["p"])
    assert conversations.find(first, {"d": 100, "p": 100}) == {"p": 10}
    assert conversations.find(first, {}) == {}


def test_the_bound_on_workers_holds_however_many_one_prompt_adds(
    seed: int, scale: Callable[[int], int]
) -> None:
    """Each request adds its prefill and its decode worker, so one call may add two and more."""
    rng, conversations = random.Random(seed), PrefixAffinity(50, max_lives=10)
    for number in range(scale(2000)):
        lives = [f"{number}-{index}" for index in range(rng.randint(1, 3))]
        old = [f"{rng.randrange(number + 1)}-0"] if rng.random() < 0.3 else []
        chain = _chain([rng.randrange(3) for _ in range(16 * rng.randint(1, 4))])
        conversations.note(chain, [*lives, *old])
        conversations.check_integrity()
        found = conversations.find(chain, dict.fromkeys(lives, 100))
        assert found == dict.fromkeys(lives, len(chain))
