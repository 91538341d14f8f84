"""The account of a step that verifies a token tree, in its smallest form on CPU: every part of it
is run, and the ways it tries replace what there is."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.decoder import (
    ABLATIONS,
    NO_MIXED,
    NO_TREES,
    attention_ways,
    going,
    product_ways,
    replaced,
    tree_batch,
    verify,
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU: on a GPU it compiles for a minute")
def test_the_last_line_is_the_account(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", "tiny", "--nodes", "3", "--context", "20", "--rounds", "1"]
    verify.main(options, standalone_mode=False)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["plain forward"] > 0 and found["ways"] == {}
    step = found["steps"]["3 nodes"]
    parts = sum(step[name] for name in ("products and norms", "rotation and KV", "attention"))
    assert parts == pytest.approx(step["forward"], abs=1e-3)
    for name in ("from idle to its end", "host: inputs", "host: launch", "draw", "move"):
        assert step[name] > 0


def test_a_tree_of_four_branches() -> None:
    batch = tree_batch(20, 6)
    (span,) = batch.spans
    assert span.branches == (-1, -1, 1, -1, -1, 4) and span.is_tree
    assert span.num_tokens == len(batch.draw_indices) == 7
    assert len(span.block_ids) == 2


def test_ways_hold_while_they_are_gone_and_no_longer() -> None:
    pytest.importorskip("triton", reason="Triton is for Linux on x86_64")
    from baton_kernels import linear_tiles

    product = linear_tiles.Product(24, 6144, 4096, 2, False)
    chosen = linear_tiles.choose_tile(product, exact=False, forced=False)
    seen = set()
    for way in (NO_TREES, NO_MIXED, *attention_ways(), *product_ways()):
        before = [getattr(target, name) for target, name, _ in way.replaced]
        with going(way):
            for target, name, stand_in in way.replaced:
                assert getattr(target, name) is stand_in
            seen.add(linear_tiles.choose_tile(product, exact=False, forced=False))
        assert [getattr(target, name) for target, name, _ in way.replaced] == before
        assert linear_tiles.choose_tile(product, exact=False, forced=False) == chosen
    assert len(seen) == 2, "one way cuts products otherwise"
    with pytest.raises(RuntimeError), going(product_ways()[0]):
        assert linear_tiles.choose_tile(product, exact=False, forced=False) != chosen
        raise RuntimeError
    assert linear_tiles.choose_tile(product, exact=False, forced=False) == chosen


def test_every_ablation_replaces_what_there_is() -> None:
    for changes in ABLATIONS.values():
        with replaced(changes):
            for target, name, stand_in in changes:
                assert getattr(target, name) is stand_in
