"""Sampler: samples one token per row of logits, on CPU and CUDA alike. The order of the processors
is fixed, because replay and resume depend on it:

    raw logits      NaN, +inf, or a row of -inf only: InvalidLogits, for that row alone
     1 repetition_penalty    of every token in prompt and output         logits_processors.py
     2 presence_penalty      of every token in the output
     3 frequency_penalty     of every token in the output, per occurrence
     4 logit_bias
     5 allowed_token_ids     hard masks: they commute
     6 bad_words
     7 no_repeat_ngram
     8 grammar
     9 min_tokens            end tokens, while fewer are there
    support         nothing left: EmptySupport, for that row alone, naming the processors
    argmax          temperature 0 ends here; ties go to the lowest token id
    10 temperature                                                       baton_kernels/sampling.py
    11 top_k                 thresholds: ties at the edge stay in
    12 top_p                 of what top_k left, renormalised
    13 min_p
    sample          argmax of scaled logit + noise of (seed, sample    baton_kernels/gumbel_noise.py
                    index, position, token id); or acceptance of         engine/speculation/
                    draft tokens (SamplingRequest.proposals)             rejection_sampler.py

Truncation cannot empty the support: each threshold is at most the best token's own.

Rows whose parameters change no logit are sampled from the model's own logits, all in one call; the
others from a float32 copy. A row's result depends on its own logits and SamplingRequest only, never
on its neighbours, to the last bit. Steps that are launched ahead sample by the same `draw_tokens`,
so that a token does not depend on how its step was run. Between CPU and CUDA a nucleus may differ
in a token whose mass ends at p within float32's rounding; all else is equal.

Log probabilities in `SamplerOutput.logprobs` and a trace's raw ones are of the model's own
distribution, before all processors. A trace's processed one is of the distribution that was sampled
from, and its support the tokens that could be sampled; for an argmax both are of the logits after
step 9.

Engine thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from baton_kernels import gumbel_noise
from baton_kernels.dispatch import Backend
from baton_kernels.sampling import (
    DrawnTokens,
    Needs,
    SamplingRows,
    best_on_cpu,
    distance_limits,
    draw_tokens,
    greedy_on_cpu,
)
from numpy.typing import NDArray

from engine.errors import EmptySupport, EngineError, InvalidLogits
from engine.outputs import PositionLogprobs, SampleTrace
from engine.request import Sampling
from engine.sampling.host_device_copies import Fetched, StreamMark, bring
from engine.sampling.logits_processors import process
from engine.sampling.logprobs import PendingLogprobs, processed_logprobs, rows_per_pass
from engine.sampling.metadata import Row, SamplerOutput, SamplingRequest, masks_ends, metadata_of
from engine.sampling.token_history import TokenHistory
from engine.speculation.rejection_sampler import judge

WARM_UP = SamplingRequest(Sampling(max_tokens=1, temperature=1.0, top_p=0.9), position=0)

NUM_TRACE_TOP = 5
"""Number of best tokens in a trace whose request has no `logprobs`."""

_MANY = 128
"""Number of rows from which the kernels of `draw_tokens` split a row differently, as another
variant."""

_NEEDS: tuple[Needs, ...] = ("greedy", "sampled", "truncated")

_new_output: Callable[[Iterable[object]], SamplerOutput] = partial(tuple.__new__, SamplerOutput)


class Sampler:
    """Samples rows of logits.

    Args: backend: the implementation of the kernels; other than "auto" in tests only.
    """

    def __init__(self, backend: Backend = "auto") -> None:
        self._backend = backend

    def warm_up(self, logits: torch.Tensor, max_rows: int = 1) -> None:
        """Sample once with each kernel variant, so that no request waits for compilation.

        Args:
            logits: [1, V], as the model returns them.
            max_rows: largest number of rows that are ever sampled together.
        """
        if logits.device.type == "cpu":
            self.begin(logits, [WARM_UP]).result()
            return
        self._warm_up_kernels(logits)
        if max_rows >= _MANY:
            self._warm_up_kernels(logits.repeat(_MANY, 1))

    def _warm_up_kernels(self, logits: torch.Tensor) -> None:
        """Launch each kernel in each variant for the number of rows of `logits`."""
        bitmask = torch.full((-(-logits.shape[1] // 32),), -1, dtype=torch.int32)
        plain = Sampling(max_tokens=1)
        kinds = (plain, dataclasses.replace(plain, temperature=1.0), WARM_UP.sampling)
        for kind in kinds:
            self.begin(logits, [SamplingRequest(kind, 0)] * len(logits)).result()
            changed = dataclasses.replace(
                kind, repetition_penalty=1.5, presence_penalty=0.5, logit_bias=((0, 1.0),)
            )
            history = TokenHistory(changed, (0,), (0,))
            one = SamplingRequest(changed, 0, history=history, bitmask=bitmask)
            self.begin(logits, [one] * len(logits)).result()

    @torch.inference_mode()
    def begin(
        self,
        logits: torch.Tensor,
        requests: Sequence[SamplingRequest],
        rows: Sequence[int] | None = None,
        *,
        into: torch.Tensor | None = None,
    ) -> PendingSample:
        """Queue the sampling of one token per request. On CUDA it does not wait for the device; on
        CPU all is computed here. Later work in the device's queue may overwrite the logits.

        Args:
            logits: [R, V] in the model's dtype; read only.
            rows: the row of each request; None: row i is request i's.
            into: [number of requests] int32 on the logits' device, which receives the token ids,
                valid ones for rows in error, too. On CUDA a row with proposals, which are verified
                on the host when the result is read, has the argmax there instead of its token.
        """
        if rows is not None:
            places = bring(np.array(rows, dtype=np.int64), logits.device)
            logits = logits.index_select(0, places)
        computed = StreamMark(logits.device) if into is None else None
        plan = _plan(requests, is_on_cpu=logits.device.type == "cpu")
        num_rows = len(requests)
        out = torch.empty(3, _aligned(num_rows), dtype=torch.int32, device=logits.device)
        token_ids = out[0, :num_rows]
        drawn = DrawnTokens(token_ids, out[1, :num_rows].view(torch.float32))
        if plan.needs == "greedy" and logits.device.type == "cpu" and self._backend == "auto":
            greedy_on_cpu(logits, drawn)
        else:
            asked = _parameters(requests, logits, plan.needs, is_greedy=plan.is_greedy)
            draw_tokens(logits, asked, needs=plan.needs, out=drawn, backend=self._backend)
        traces: list[_PendingTraces] = []
        if plan.copied:
            best_values = out[2, :num_rows].view(torch.float32)
            traces = self._sample_copies(logits, plan.copied, token_ids, best_values)
        if into is not None:
            into.copy_(token_ids)
        return PendingSample(
            requests,
            plan,
            Fetched(out if plan.copied else out[:2]),
            _begin_logprobs(logits, plan.reported, token_ids) if plan.reported else None,
            traces,
            self._begin_judged(logits, plan.judged_later) if plan.judged_later else None,
            computed,
        )

    def _sample_copies(
        self,
        logits: torch.Tensor,
        rows: list[Row],
        token_ids: torch.Tensor,
        best_values: torch.Tensor,
    ) -> list[_PendingTraces]:
        """Sample rows from a float32 copy of their logits, part by part.

        Args:
            token_ids: [all rows]; those of the given rows are overwritten.
            best_values: [all rows] float32; those of the given rows are overwritten with the
                greatest logit after step 9.
        """
        traces: list[_PendingTraces] = []
        size = rows_per_pass(logits)
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            places = bring(np.array([row.place for row in part], dtype=np.int64), logits.device)
            own = logits.index_select(0, places).float()
            process(own, part, backend=self._backend)
            requests = [row.request for row in part]
            needs = _most([row.metadata.needs for row in part])
            asked = _parameters(requests, own, needs)
            drawn = draw_tokens(own, asked, needs=needs, backend=self._backend)
            if own.device.type == "cpu":
                self._judge(own, part, drawn.token_ids)
            token_ids.index_copy_(0, places, drawn.token_ids)
            best_values.index_copy_(0, places, drawn.best_values)
            traced = [at for at, row in enumerate(part) if row.request.sampling.trace]
            if traced:
                traces.append(self._begin_traces(own, part, traced, drawn.token_ids))
        return traces

    def _judge(self, own: torch.Tensor, rows: list[Row], token_ids: torch.Tensor) -> None:
        """Overwrite the tokens of rows whose proposals are verified.

        Args: own: [R, V] float32 on CPU, after step 9.
        """
        judged = [at for at, row in enumerate(rows) if _is_judged(row)]
        if not judged:
            return
        found = self._distributions(own[judged], [rows[at].request for at in judged])
        for at, distribution in zip(judged, found, strict=True):
            proposals = rows[at].request.proposals
            if proposals is not None and not np.isnan(distribution[0]):
                token_ids[at] = judge(distribution, proposals)

    def _begin_judged(self, logits: torch.Tensor, rows: list[Row]) -> _PendingJudged:
        """Queue a copy to the host of the logits of rows whose proposals are verified there."""
        places = bring(np.array([row.place for row in rows], dtype=np.int64), logits.device)
        # numpy has no bfloat16.
        own = Fetched(logits.index_select(0, places).float())
        return _PendingJudged(rows, own, self)

    def _begin_traces(
        self, own: torch.Tensor, rows: list[Row], traced: list[int], token_ids: torch.Tensor
    ) -> _PendingTraces:
        """Queue the values that a trace reports in addition to the token.

        Args:
            own: [R, V] float32, after step 9.
            traced: indices of the rows that have a trace.
            token_ids: [R] int32.
        """
        places = bring(np.array(traced, dtype=np.int64), own.device)
        own = own.index_select(0, places)
        requests = [rows[at].request for at in traced]
        asked, distances, limits = self._distances(own, requests)
        is_sampled = asked.temperature > 0.0
        processed = torch.where(is_sampled[:, None], -distances, own)
        floors = torch.where(is_sampled, -limits, -torch.inf)
        chosen = token_ids.index_select(0, places).long()
        logprobs, sizes = processed_logprobs(processed, floors, chosen)
        words = torch.stack([logprobs.view(torch.int32), sizes])
        return _PendingTraces([rows[at] for at in traced], Fetched(words))

    def _distances(
        self, own: torch.Tensor, requests: Sequence[SamplingRequest]
    ) -> tuple[SamplingRows, torch.Tensor, torch.Tensor]:
        """Return the requests' parameters, and [R, V] distances and [R] limits as `draw_tokens`
        defines them. Results of a row in error are undefined.

        Args: own: [R, V] float32, after step 9.
        """
        asked = _parameters(requests, own, "truncated")
        best = own.amax(dim=1, keepdim=True)
        is_sound = best.isfinite()
        temperature = torch.where(asked.temperature > 0.0, asked.temperature, 1.0)
        distances = (torch.where(is_sound, best, 0.0) - own) / temperature[:, None]
        distances = torch.where(is_sound, distances, 0.0)
        return asked, distances, distance_limits(distances, asked, backend=self._backend)

    @torch.inference_mode()
    def distributions(
        self, logits: torch.Tensor, requests: Sequence[SamplingRequest]
    ) -> NDArray[np.float64]:
        """Compute the distributions that `begin` would sample from, [R, V]; NaN in a row for which
        it would return an error.

        Args:
            logits: [R, V] in the model's dtype, on any device; read only.
            requests: R of them, all with a temperature above 0.
        """
        found = np.empty(tuple(logits.shape), dtype=np.float64)
        # Piece by piece: a row's passes take several times what its result does.
        size = rows_per_pass(torch.empty(0, logits.shape[-1]))
        for start in range(0, len(requests), size):
            part = slice(start, start + size)
            own = logits[part].to("cpu", torch.float32, copy=True)
            rows = [
                Row(place, one, metadata_of(one.sampling))
                for place, one in enumerate(requests[part])
            ]
            raw, _ = best_on_cpu(own)
            process(own, rows)
            own[torch.from_numpy(~np.isfinite(raw))] = torch.nan
            found[part] = self._distributions(own, requests[part])
        return found

    def _distributions(
        self, own: torch.Tensor, requests: Sequence[SamplingRequest]
    ) -> NDArray[np.float64]:
        """Compute the distributions of some rows.

        Args: own: [R, V] float32 on CPU, after step 9.
        """
        _, distances, limits = self._distances(own, requests)
        scores = -distances.numpy().astype(np.float64)
        floors = -limits.numpy()[:, None]
        shares: NDArray[np.float64] = np.where(scores >= floors, np.exp(scores), 0.0)
        shares /= shares.sum(axis=1, keepdims=True)
        best, _ = best_on_cpu(own)
        shares[~np.isfinite(best)] = np.nan
        return shares


class PendingSample:
    """Queued sampled tokens.

    Args:
        drawn: [2 or 3, R or more] int32: token ids, the bits of the greatest raw logits, and, if
            rows were copied, the bits of the greatest logits after step 9.
        computed: the point in the queue before the sampling.
    """

    def __init__(
        self,
        requests: Sequence[SamplingRequest],
        plan: _Plan,
        drawn: Fetched,
        logprobs: PendingLogprobs | None,
        traces: list[_PendingTraces],
        judged: _PendingJudged | None,
        computed: StreamMark | None,
    ) -> None:
        self._requests = requests
        self._plan = plan
        self._drawn = drawn
        self._logprobs = logprobs
        self._traces = traces
        self._judged = judged
        self._computed = computed

    def result(self) -> list[SamplerOutput]:
        """Wait for the tokens. Returns: one output per request. Call it once only."""
        if self._computed is not None:
            # To wake up takes the host as long as sampling takes the device, which waits for what
            # comes of it: the host is awake when the tokens are there.
            self._computed.wait()
        words = self._drawn.wait()[:, : len(self._requests)]
        outputs = _argmaxes(self._requests, words[0].tolist(), words[1].view(np.float32))
        if self._plan.copied:
            self._find_errors(words[2].view(np.float32), outputs)
        if self._logprobs is not None:
            self._report(self._logprobs.result(), outputs)
        if self._judged is not None:
            for row, one in zip(self._judged.rows, self._judged.result(), strict=True):
                outputs[row.place] = one
        return outputs

    def _find_errors(self, best_values: NDArray[np.float32], outputs: list[SamplerOutput]) -> None:
        """Set the error of copied rows whose greatest raw logit is finite, and whose greatest logit
        after step 9 is not."""
        for row in self._plan.copied:
            value = float(best_values[row.place])
            if not np.isfinite(value) and outputs[row.place].error is None:
                outputs[row.place] = SamplerOutput(-1, error=_unsound(row, value))

    def _report(self, raws: list[PositionLogprobs], outputs: list[SamplerOutput]) -> None:
        """Add log probabilities and traces to the outputs of the requests that want them."""
        traced = {place: found for trace in self._traces for place, found in trace.result()}
        for row, raw in zip(self._plan.reported, raws, strict=True):
            if outputs[row.place].error is not None:
                continue
            sampling, token_id = row.request.sampling, raw.token_id
            trace = None
            if sampling.trace:
                processed_logprob, support_size = traced[row.place]
                trace = SampleTrace(
                    position=row.request.position,
                    token_id=token_id,
                    raw_logprob=raw.logprob,
                    processed_logprob=processed_logprob,
                    top=raw.top,
                    support_size=support_size,
                    processors=row.names,
                    rng_key=_rng_key(row),
                )
            logprobs = None
            if sampling.logprobs is not None:
                logprobs = PositionLogprobs(token_id, raw.logprob, raw.top[: sampling.logprobs])
            outputs[row.place] = SamplerOutput(token_id, logprobs, trace)


class _PendingTraces(NamedTuple):
    rows: list[Row]
    words: Fetched
    """[2, number of rows] int32: the bits of the processed log probability, and the support
    size."""

    def result(self) -> list[tuple[int, tuple[float, int]]]:
        """Wait for the values. Returns: (index of the row, (processed log probability, support
        size)) of each row."""
        words = self.words.wait()
        found = zip(words[0].view(np.float32).tolist(), words[1].tolist(), strict=True)
        return [(row.place, one) for row, one in zip(self.rows, found, strict=True)]


class _PendingJudged(NamedTuple):
    rows: list[Row]
    logits: Fetched
    sampler: Sampler

    def result(self) -> list[SamplerOutput]:
        """Wait for the logits, and sample the rows on CPU."""
        logits = torch.from_numpy(self.logits.wait())
        return self.sampler.begin(logits, [row.request for row in self.rows]).result()


class _Plan(NamedTuple):
    """The choice of how each row of a step is sampled."""

    needs: Needs
    """The kind of sampling of the rows that are sampled from the model's own logits."""
    is_greedy: list[bool]
    """Whether the argmax of the model's own logits is enough, by request, since the row is sampled
    otherwise."""
    copied: list[Row]
    """Rows that are sampled from a copy of their logits, which is changed or read again."""
    reported: list[Row]
    """Rows with log probabilities or a trace."""
    judged_later: list[Row]
    """Rows whose proposals are verified on the host when the result is read."""


def _plan(requests: Sequence[SamplingRequest], *, is_on_cpu: bool) -> _Plan:
    plan = _Plan("greedy", [False] * len(requests), [], [], [])
    needs: set[Needs] = {"greedy"}
    for place, one in enumerate(requests):
        metadata = metadata_of(one.sampling)
        if metadata.is_plain and one.bitmask is None:
            continue
        row = Row(place, one, metadata)
        is_judged = _is_judged(row)
        if is_judged and not is_on_cpu:
            plan.is_greedy[place] = True
            plan.judged_later.append(row)
            continue
        if (
            metadata.adjusts
            or one.bitmask is not None
            or one.sampling.trace
            or masks_ends(one)
            or is_judged
        ):
            plan.is_greedy[place] = True
            plan.copied.append(row)
        else:
            needs.add(metadata.needs)
        if one.sampling.logprobs is not None or one.sampling.trace:
            plan.reported.append(row)
    return plan._replace(needs=_most(needs))


def _is_judged(row: Row) -> bool:
    return row.request.proposals is not None and row.metadata.needs != "greedy"


def _most(needs: Iterable[Needs]) -> Needs:
    return max(needs, key=_NEEDS.index)


def _parameters(
    requests: Sequence[SamplingRequest],
    logits: torch.Tensor,
    needs: Needs,
    is_greedy: Sequence[bool] | None = None,
) -> SamplingRows:
    """Collect the rows' parameters on the logits' device, with one copy.

    Args: is_greedy: whether each row is sampled without noise, whatever its request says; None:
        none is.
    """
    num_rows, (_, num_tokens) = len(requests), logits.shape
    device = logits.device
    words = np.zeros((7, _aligned(num_rows)), dtype=np.int32)
    if needs != "greedy":
        samplings = [one.sampling for one in requests]
        words[:2].reshape(-1).view(np.int64)[:num_rows] = gumbel_noise.seed_keys(
            [one.seed for one in samplings], [one.sample_index for one in requests]
        )
        words[2, :num_rows] = [one.position for one in requests]
        words[3, :num_rows] = [min(one.top_k, num_tokens) for one in samplings]
        floats = words[4:, :num_rows].view(np.float32)
        floats[0] = [one.temperature for one in samplings]
        if is_greedy is not None:
            floats[0, is_greedy] = 0.0
        floats[1] = [one.top_p for one in samplings]
        floats[2] = [one.min_p for one in samplings]
    copied = bring(words, device)
    temperature, top_p, min_p = copied[4:, :num_rows].view(torch.float32)
    if device.type == "cpu" and needs != "greedy":
        # Not rounded: the edge of a nucleus is where the request says.
        top_p = torch.tensor([one.top_p for one in samplings], dtype=torch.float64)
        min_p = torch.tensor([one.min_p for one in samplings], dtype=torch.float64)
    return SamplingRows(
        temperature=temperature,
        seed_keys=copied[:2].view(-1).view(torch.int64)[:num_rows],
        positions=copied[2, :num_rows],
        top_k=copied[3, :num_rows],
        top_p=top_p,
        min_p=min_p,
    )


def _aligned(num_words: int) -> int:
    """Return the number of int32 words, rounded up to 16 bytes: Triton compiles another variant of
    a kernel for pointers that are not aligned to 16 bytes."""
    return -(-num_words // 4) * 4


def _begin_logprobs(
    logits: torch.Tensor, rows: list[Row], token_ids: torch.Tensor
) -> PendingLogprobs:
    """Queue the raw log probabilities of the rows' tokens.

    Args: token_ids: int32, the token of each row of the logits.
    """
    places = [row.place for row in rows]
    counts = [
        max(row.request.sampling.logprobs or 0, NUM_TRACE_TOP * row.request.sampling.trace)
        for row in rows
    ]
    index = bring(np.array(places, dtype=np.int64), logits.device)
    return PendingLogprobs(logits, places, token_ids.index_select(0, index).long(), counts)


def _argmaxes(
    requests: Sequence[SamplingRequest], token_ids: list[int], values: NDArray[np.float32]
) -> list[SamplerOutput]:
    """Return the outputs of the sampled tokens, with errors for rows whose raw logits are not
    finite.

    Args: values: the greatest logit of each row.
    """
    # Without a call to Python each: the device waits for what comes of it.
    nones = repeat(None)
    outputs = list(map(_new_output, zip(token_ids, nones, nones, nones, strict=False)))
    is_valid = np.isfinite(values)
    if False in is_valid.tolist():  # half as long as to ask numpy
        for place in np.flatnonzero(~is_valid).tolist():
            message = f"the best logit for position {requests[place].position} is {values[place]}"
            outputs[place] = SamplerOutput(-1, error=InvalidLogits(message))
    return outputs


def _unsound(row: Row, value: float) -> EngineError:
    """Return the error of a row whose greatest logit was finite before steps 1 to 9, and is `value`
    after."""
    names = row.adjusting_names
    if value == -np.inf:
        return EmptySupport(names, row.request.position)
    return InvalidLogits(
        f"the best logit for position {row.request.position} is {value} after {', '.join(names)}"
    )


def _rng_key(row: Row) -> int | None:
    """Return the key of the row's noise; None if the token is an argmax or was chosen from
    proposals."""
    one = row.request
    if row.metadata.needs == "greedy" or one.proposals is not None:
        return None
    return gumbel_noise.row_key(one.sampling.seed, one.sample_index, one.position)
