"""AnswerChains: background chains that store the full blocks of one request's samples. There are
none where nothing is written back, and none for a beam search, whose blocks are not in the prefix
cache. One request, the loop's thread."""

from __future__ import annotations

from collections.abc import Iterable

from engine.outputs import RequestOutput
from services.decode.ask import DecodeAsk
from services.decode.intake import Handover, Intake
from services.worker.provenance import Leg
from services.worker.write_behind import WriteBehind, WriteChain


class AnswerChains:
    """Background chains of one request's samples. Life: `follow` once -> `add` and `end` ->
    `end_all`."""

    def __init__(self, write_behind: WriteBehind, ask: DecodeAsk, leg: Leg, *, is_on: bool) -> None:
        self._write_behind = write_behind
        self._is_on = is_on and write_behind.has_store
        self._ask = ask
        self._leg = leg
        self._chains: dict[int, WriteChain] = {}

    def follow(self, intake: Intake, handover: Handover, samples: Iterable[int]) -> None:
        """Begin to store the blocks that these samples fill, preceded by the prompt's blocks that
        only another node's store has."""
        ask = self._ask
        if ask.beam is not None or not self._is_on:
            return
        hashes = intake.hashes(intake.look_at(handover))
        num_at_home = intake.num_at_home(handover)
        num_prompt_blocks = len(ask.prompt_token_ids) // intake.block_size
        for index in samples:
            # What the prompt's blocks lack is filled by the first sample, before the others part.
            known = hashes[: intake.num_blocks] if index == 0 else hashes[:num_prompt_blocks]
            self._chains[index] = self._write_behind.begin(
                ask.tenant,
                known,
                self._leg,
                num_stored=min(num_at_home, len(known)),
                num_reached=len(known),
                num_prompt_blocks=num_prompt_blocks,
            )

    def add(self, event: RequestOutput) -> None:
        """Add the blocks that a step filled."""
        chain = self._chains.get(event.sample_index)
        if chain is not None and event.filled:
            self._write_behind.add(chain, event.filled)

    def end(self, sample_index: int) -> None:
        """End a sample's chain. Idempotent."""
        chain = self._chains.get(sample_index)
        if chain is not None:
            self._write_behind.end(chain)

    def end_all(self) -> None:
        """End the chains of all samples. Idempotent."""
        for chain in self._chains.values():
            self._write_behind.end(chain)
