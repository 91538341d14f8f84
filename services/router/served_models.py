"""The models that one router serves, by name: each with its own tokenizer, defaults, workers and
placement. Values; pure.

A worker belongs to a model if it names that model, tokenizer and fingerprint. Stores, streams, the
table of requests and the prefix index are shared by all models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from process.rpc_errors import InvalidArgument
from process.settings import SettingsError
from protos import inference_pb2
from services.router.placement import Placer
from services.router.policies import DECODE, PREFILL
from services.router.request import Preparer, RoutingServices
from services.router.worker_directory import WorkerDirectory
from services.router.worker_views import ServedModel

_MAX_NAME_CHARS = 128
"""Of a name that a client sent, in an error."""


@dataclass(frozen=True)
class OneModel:
    """What serves the requests for one model."""

    name: str
    """As answers name it."""
    served: ServedModel
    preparer: Preparer
    cluster: RoutingServices

    def infos(self) -> Iterator[inference_pb2.ModelInfo]:
        """Once for each fingerprint among its workers. The window is that of the longest request
        that some pair takes."""
        workers = [w for role in (PREFILL, DECODE) for w in self.candidates.usable(role)]
        for fingerprint in sorted({worker.fingerprint for worker in workers}):
            alike = [worker for worker in workers if worker.fingerprint == fingerprint]
            longest = (
                max(worker.context_window for worker in alike if worker.role == role)
                for role in {worker.role for worker in alike}
            )
            yield inference_pb2.ModelInfo(
                model=self.name,
                model_fingerprint=fingerprint,
                context_window=min(longest),
                vocab_size=min(worker.vocab_size for worker in alike),
                dtype=alike[0].dtype,
            )

    @property
    def candidates(self) -> WorkerDirectory:
        return self.cluster.candidates

    @property
    def routing(self) -> Placer:
        return self.cluster.routing


class ServedModels:
    """See the module."""

    def __init__(self, models: Sequence[OneModel]) -> None:
        """In the order of the settings. Raises: SettingsError when two share a name."""
        self._models = tuple(models)
        self._by_name: dict[str, OneModel] = {}
        for model in self._models:
            for name in model.served.names:
                if self._by_name.setdefault(name, model) is not model:
                    raise SettingsError(
                        f"models: {name!r} names two of the models; leave one of them out"
                    )

    def __iter__(self) -> Iterator[OneModel]:
        return iter(self._models)

    @property
    def names(self) -> Sequence[str]:
        """One of each, as answers name it."""
        return [model.name for model in self._models]

    @property
    def all_names(self) -> Set[str]:
        """All that requests may name the models by: no adapter is asked for under these."""
        return self._by_name.keys()

    def name_of(self, name: str) -> str:
        """How the model is named in answers that a client asked for under `name`; `name` itself
        when there is none."""
        try:
            return self.find(name).name
        except InvalidArgument:
            return name[:_MAX_NAME_CHARS]

    def find(self, name: str) -> OneModel:
        """The model of this name; an empty one means the only model.

        Raises: InvalidArgument naming those that are served.
        """
        if not name and len(self._models) == 1:
            return self._models[0]
        found = self._by_name.get(name)
        if found is not None:
            return found
        there = ", ".join(self.names)
        if not name:
            raise InvalidArgument("model", f"is needed, there are several: {there}")
        raise InvalidArgument(
            "model", f"'{name[:_MAX_NAME_CHARS]}' is not served here; served: {there}"
        )

    def check_integrity(self) -> None:
        """Raises: Internal when a law of one model's routing is broken."""
        for model in self._models:
            model.routing.check_integrity()
