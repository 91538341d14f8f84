"""A recorded request as one JSON object: the request, its sampling parameters and its samples; and
the comparison with a second run.

    {"schema": "baton-record", "version": 1,
     "model": name, "model_fingerprint": hex, "adapter_digest": hex or empty, "seed": number,
     "request": GenerateRequest, "sampling": SamplingParams with every default filled in,
     "prompt_token_ids": [...],
     "samples": [{"sample_index", "token_ids", "text", "finish_reason", "stop_token_id",
                  "stop_string", "score", "traces": [StepTrace]}]}

Messages are in protobuf's JSON with the names of the proto. A reader refuses any other version; a
change of the format gets a new one. Any thread.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from baton.answers import Completion
from baton.errors import InvalidArgument
from baton.request import DEFAULT_TIMEOUT_S
from process.secret_files import replace_file
from protos import inference_pb2

SCHEMA = "baton-record"
VERSION = 1

# Parameters that decide the tokens and may have been left to a default.
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
# Fields that belong to one run, not to the request.
_OF_ONE_RUN = ("request_id", "budget_ms")


@dataclass(frozen=True)
class RecordedRequest:
    """A recorded request and its samples, which `baton replay` runs again."""

    model: str
    model_fingerprint: str
    adapter_digest: str
    seed: int
    request: Mapping[str, Any]
    sampling: Mapping[str, Any]
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs, with the values of both where `what` does not say them."""

    what: str
    recorded: Mapping[str, Any] | None = None
    replayed: Mapping[str, Any] | None = None


def record_of(
    request: inference_pb2.GenerateRequest, completions: Sequence[Completion]
) -> RecordedRequest:
    """Make the record of a run that had `sampling.trace`."""
    first = completions[0]
    asked = inference_pb2.GenerateRequest()
    asked.CopyFrom(request)
    for name in _OF_ONE_RUN:
        asked.ClearField(name)
    return RecordedRequest(
        model=first.provenance.model,
        model_fingerprint=first.provenance.model_fingerprint,
        adapter_digest=first.provenance.adapter_digest,
        seed=first.seed,
        request=json_format.MessageToDict(asked, preserving_proto_field_name=True),
        sampling=first.sampling,
        prompt_token_ids=first.prompt_token_ids,
        samples=tuple(_sample(completion) for completion in completions),
    )


def request_of(
    record: RecordedRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> inference_pb2.GenerateRequest:
    """Make the recorded request again, with the defaults of then filled in, so that it must give
    the same tokens.

    Raises: InvalidArgument where the record holds no valid request.
    """
    try:
        request = json_format.ParseDict(dict(record.request), inference_pb2.GenerateRequest())
        filled = json_format.ParseDict(dict(record.sampling), type(request.sampling)())
    except json_format.ParseError as error:
        raise InvalidArgument("record.request", f"is not a request: {error}") from error
    for name in _DEFAULTED:
        setattr(request.sampling, name, getattr(filled, name))
    request.sampling.trace = True
    request.budget_ms = max(1, int(timeout_s * 1000))
    return request


def write(record: RecordedRequest, file: Path) -> None:
    """Write a record into a file as one JSON object. Raises: OSError."""
    value = {"schema": SCHEMA, "version": VERSION, **dataclasses.asdict(record)}
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    replace_file(file, text + "\n", mode=0o666)


def read(file: Path) -> RecordedRequest:
    """Read a record from a file. Raises: InvalidArgument for a damaged one; OSError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("record", f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise InvalidArgument("record", f"{file} is not a record of `baton generate --record`")
    if value.get("version") != VERSION:
        raise InvalidArgument(
            "record", f"{file} has version {value.get('version')}, this baton reads {VERSION}"
        )
    try:
        return RecordedRequest(
            model=str(value["model"]),
            model_fingerprint=str(value["model_fingerprint"]),
            adapter_digest=str(value["adapter_digest"]),
            seed=int(value["seed"]),
            request=dict(value["request"]),
            sampling=dict(value["sampling"]),
            prompt_token_ids=tuple(int(token_id) for token_id in value["prompt_token_ids"]),
            samples=tuple(_checked_sample(sample) for sample in value["samples"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument("record", f"{file} is damaged: {error!r}") from error


def difference(record: RecordedRequest, completions: Sequence[Completion]) -> Difference | None:
    """Find the first difference of a second run from a record; None: they are equal."""
    first = completions[0]
    if first.provenance.model_fingerprint != record.model_fingerprint:
        return Difference(
            f"another model: {record.model_fingerprint[:16]} was recorded, "
            f"{first.provenance.model_fingerprint[:16]} answered"
        )
    if first.provenance.adapter_digest != record.adapter_digest:
        return Difference(
            f"the adapter has other content now: {record.adapter_digest[:16] or 'none'} was "
            f"recorded, {first.provenance.adapter_digest[:16] or 'none'} answered"
        )
    if first.prompt_token_ids != record.prompt_token_ids:
        return Difference("the prompt became other tokens")
    if len(completions) != len(record.samples):
        return Difference(f"{len(record.samples)} samples were recorded, {len(completions)} came")
    for recorded, completion in zip(record.samples, completions, strict=True):
        found = _sample_difference(recorded, _sample(completion))
        if found is not None:
            return found
    return None


def _sample_difference(
    recorded: Mapping[str, Any], replayed: Mapping[str, Any]
) -> Difference | None:
    theirs, ours = list(recorded["token_ids"]), list(replayed["token_ids"])
    name = f"sample {replayed['sample_index']}"
    for position in range(max(len(theirs), len(ours))):
        if theirs[position : position + 1] != ours[position : position + 1]:
            return Difference(
                f"{name} differs at output token {position}",
                _at(recorded, position),
                _at(replayed, position),
            )
    for field in ("finish_reason", "stop_token_id", "stop_string", "text"):
        if recorded[field] != replayed[field]:
            return Difference(
                f"{name} has the same tokens and another {field}",
                {field: recorded[field]},
                {field: replayed[field]},
            )
    return None


def _at(sample: Mapping[str, Any], position: int) -> Mapping[str, Any]:
    """The trace of one output token; without one its id, or the finish reason after the last."""
    if position >= len(sample["token_ids"]):
        return {"ended": sample["finish_reason"]}
    if position < len(sample["traces"]):
        trace: Mapping[str, Any] = sample["traces"][position]
        return trace
    return {"token_id": sample["token_ids"][position]}


def _sample(completion: Completion) -> Mapping[str, Any]:
    names = ("sample_index", "text", "finish_reason", "stop_token_id", "stop_string", "score")
    return {
        **{name: getattr(completion, name) for name in names},
        "token_ids": list(completion.token_ids),
        "traces": [plain(dataclasses.asdict(trace)) for trace in completion.traces],
    }


def plain(value: Any) -> Any:
    """Convert a value to JSON values; a NaN or infinite logprob (of a forced token) becomes
    null."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _checked_sample(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check a sample of a record. Raises: KeyError, TypeError, ValueError."""
    for name in ("text", "finish_reason", "stop_string", "stop_token_id", "traces"):
        sample[name]
    return {**sample, "token_ids": [int(token_id) for token_id in sample["token_ids"]]}
