"""What decode is told of each sample, and what no worker may say."""

from __future__ import annotations

from typing import Any

import pytest

from process.rpc_errors import Internal
from protos import common_pb2, prefill_pb2
from services.router.output import AnswerOutput, SampleOutput
from services.router.worker_client import SampleNews
from tests.harness.small_tokenizers import byte_level
from tokens.text import OutputText

TOKENIZER = byte_level()
A, B, C = TOKENIZER.encode("abc")


def _samples(n: int, **sampling: Any) -> AnswerOutput:
    answers = [SampleOutput("r", OutputText(TOKENIZER), sample_index=index) for index in range(n)]
    return AnswerOutput(answers, common_pb2.SamplingParams(n=n, **sampling))


def _first(index: int, *token_ids: int, **fields: Any) -> prefill_pb2.PrefillReply:
    return prefill_pb2.PrefillReply(sample_index=index, token_ids=token_ids, **fields)


def test_what_was_told_stands_where_another_worker_draws_otherwise() -> None:
    """Kernels that depend on the batch: neither the token, nor what follows it, nor its end."""
    samples = _samples(2)
    samples.take_first(_first(0, A))
    samples.begin_prefill()
    over = _first(0, B, C, finish_reason=common_pb2.FINISH_REASON_EOS, stop_token_id=C)
    assert samples.take_first(over) is None
    message = samples.take_first(_first(1, C))
    assert message is not None and message.text == "c"
    assert samples.has_all_firsts and samples.num_drawn_otherwise == 1
    told = [(list(o.token_ids), o.is_over) for o in samples.handover().outputs]
    assert told == [([A], False), ([C], False)]


def test_a_beam_search_hands_its_candidates_over_and_shows_nothing() -> None:
    samples = _samples(2, beam=common_pb2.BeamParams(num_beams=2))
    start = [common_pb2.BeamCandidate(token_id=A, logprob=-0.5)]
    assert samples.take_first(_first(0, beam_start=start)) is None
    assert samples.has_all_firsts
    assert [c.token_id for c in samples.handover().beam_start] == [A]


def test_overshoot_and_samples_that_are_none() -> None:
    samples = _samples(1)
    samples.take_first(_first(0, A))
    taken = samples.take(SampleNews(0, [C], reason=common_pb2.FINISH_REASON_LENGTH))
    assert taken is not None and taken[1].text == "c" and samples.is_over
    assert samples.take(SampleNews(0, [C])) is None
    for wrong in (lambda: samples.take(SampleNews(1)), lambda: samples.take_first(_first(1, A))):
        with pytest.raises(Internal, match="drew sample 1"):
            wrong()


def test_who_goes_on_is_told_all_that_was_drawn() -> None:
    samples = _samples(1)
    samples.begin_prefill()
    assert not samples.told_to_prefill
    samples.take_first(_first(0, A))
    samples.take(SampleNews(0, [B, C]))
    assert list(samples.drawn) == [A, B, C]
    samples.begin_prefill()
    assert list(samples.told_to_prefill) == [A, B, C] and not samples.has_all_firsts
    message = samples.take_first(_first(0, A))  # the next one, though it is equal to the first
    assert message is not None and message.text == "a"
    assert list(samples.told_to_prefill) == [A, B, C]  # of that call, also when it is asked again
    assert list(samples.handover().output_token_ids) == [A, B, C, A]
    alone = samples.handover(computes_prompt=True)
    assert alone.computes_prompt and list(alone.output_token_ids) == [A, B, C, A]


def test_several_samples_draw_their_first_tokens_again_and_show_what_was_missing() -> None:
    samples = _samples(2, logprobs=0)
    samples.begin_prefill()
    samples.take(SampleNews(0, [A]))
    samples.take(SampleNews(0, [B]))
    assert not samples.may_skip_prefill  # nobody draws a first token where others have theirs
    samples.begin_prefill()
    assert not samples.told_to_prefill
    assert samples.take_first(_first(0, A)) is None
    message = samples.take_first(_first(1, C))
    assert message is not None and message.text == "c"
    assert samples.has_all_firsts and samples.may_skip_prefill
    assert [list(o.token_ids) for o in samples.handover().outputs] == [[A, B], [C]]
    samples.begin_prefill()
    assert samples.take_first(_first(0, C)) is None
    assert [list(o.token_ids) for o in samples.handover().outputs] == [[A, B], [C]]


def test_of_several_first_tokens_those_that_are_new_are_shown_with_their_logprobs() -> None:
    samples = _samples(2, logprobs=0)
    samples.take_first(_first(0, A))
    probs = [common_pb2.TokenLogprobs(chosen={"token_id": token_id}) for token_id in (A, B)]
    message = samples.take_first(_first(0, A, B, logprobs=probs))
    assert message is not None and list(message.token_ids) == [B]
    assert [entry.chosen.token_id for entry in message.logprobs] == [B]


def test_what_a_worker_says_to_have_sent_is_compared_with_what_came() -> None:
    samples = _samples(2)
    for index, first in enumerate((A, B)):
        samples.take_first(_first(index, first))
    samples.take(SampleNews(1, [C], reason=common_pb2.FINISH_REASON_LENGTH))
    samples.take(SampleNews(1, [A]))  # behind its end: drawn, and shown to nobody
    samples.check_sent([1, 3])
    for wrong in ([1, 2], [2, 3], [1], []):
        with pytest.raises(Internal, match="sent"):
            samples.check_sent(wrong)


def test_beams_go_on_until_one_is_shown() -> None:
    samples = _samples(2, beam=common_pb2.BeamParams(num_beams=2))
    start = [common_pb2.BeamCandidate(token_id=A, logprob=-0.5)]
    samples.take_first(_first(0, beam_start=start))
    samples.check_sent([])
    samples.check_sent([0, 0])
    assert samples.can_go_on
    samples.begin_prefill()
    assert not samples.has_all_firsts and samples.take_first(_first(0, beam_start=start)) is None
    samples.take(SampleNews(1, [A], reason=common_pb2.FINISH_REASON_LENGTH))
    assert not samples.can_go_on


def test_a_prompts_log_probabilities_are_told_once_over_all_calls() -> None:
    samples = AnswerOutput([], common_pb2.SamplingParams(), num_scored_tokens=3)

    def take(*token_ids: int) -> list[int]:
        entries = [
            common_pb2.TokenLogprobs(chosen=common_pb2.TokenLogprob(token_id=token_id))
            for token_id in token_ids
        ]
        return [entry.chosen.token_id for entry in samples.take_prompt(entries)]

    assert samples.begin_prompt() and take(A, B) == [A, B]
    with pytest.raises(Internal, match="2 of 3 prompt tokens"):
        samples.take_first(_first(0, A))
    assert samples.begin_prompt()
    assert take(A) == [] and take(B, C) == [C]
    assert not samples.begin_prompt()  # another call need not tell them
    with pytest.raises(Internal, match="more of the prompt"):
        take(A, B, C, A)
