"""`ServedModels`: the models that one router serves, by name, each with its own tokenizer,
defaults, workers and placement.

A worker serves a model if it reports one of that model's names and the same tokenizer. Stores,
streams, the table of requests and the prefix index are shared by all models.
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
"""Most characters of a client's model name in an error message."""


@dataclass(frozen=True)
class OneModel:
    """One served model with what serves its requests."""

    name: str
    """Name of the model in answers."""
    served: ServedModel
    preparer: Preparer
    cluster: RoutingServices

    def infos(self) -> Iterator[inference_pb2.ModelInfo]:
        """Yield the model's info for each fingerprint among its workers. The context window is that
        of the longest request that some pair of workers takes."""
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
    """Table of the served models, by every name that requests may use."""

    def __init__(self, models: Sequence[OneModel]) -> None:
        """`models`: in the order of the settings. Raises: SettingsError when two share a name."""
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
        """Name of each model in answers."""
        return [model.name for model in self._models]

    @property
    def all_names(self) -> Set[str]:
        """All names that requests may use for the models; they never name an adapter."""
        return self._by_name.keys()

    def name_of(self, name: str) -> str:
        """Return the name in answers of the model that a client calls `name`; `name` itself,
        shortened, when there is no such model."""
        try:
            return self.find(name).name
        except InvalidArgument:
            return name[:_MAX_NAME_CHARS]

    def find(self, name: str) -> OneModel:
        """Return the model with this name; an empty name means the only model.

        Raises: InvalidArgument naming the served models.
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
        """Check the placement of each model. Raises: Internal when an invariant is broken."""
        for model in self._models:
            model.routing.check_integrity()
