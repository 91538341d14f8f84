"""A set of certificates kept in Secrets of a Kubernetes cluster: made at first, renewed ever after.

PREFIX-ca holds the CA with its key, and nothing mounts it; PREFIX-ROLE holds ca.crt, tls.crt and
tls.key of one role, as cert-manager would write them, so pods do not know which of the two did.
The CA stays what it was: pods that have the new certificates and pods that have the old ones still
trust each other. Runs inside the cluster (or with a user's kubeconfig); each call is bounded.
Knows no chart. Blocking; any thread.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton import certs
from baton.certs import CertsError
from process import kubernetes_config
from process.access import PeerRole
from process.kubernetes_config import NAMESPACE_FILE
from process.settings import SettingsError

TIMEOUT_S = 10.0
"""Of one call."""


@dataclass(frozen=True)
class Place:
    """Where the set lies."""

    prefix: str
    """Of the Secrets' names."""

    namespace: str = ""
    """Empty: that of the pod this runs in."""

    owner: str = ""
    """A ServiceAccount there: the Secrets are removed with it. Empty: they stay."""

    def name(self, of: str) -> str:
        """Of a Secret."""
        return f"{self.prefix}-{of}"


def write(
    place: Place,
    *,
    hosts: Sequence[str],
    days: int,
    servers: Mapping[str, str],
    flips: bool = False,
    api: Any = None,
    namespace_file: Path = NAMESPACE_FILE,
) -> list[str]:
    """Make the set, or renew its certificates.

    Args: api: a `kubernetes.client.CoreV1Api`; None: that of the cluster this runs in.
        namespace_file: says the namespace where `place` does not. The rest as `certs.write`.
    Returns: the Secrets' names.
    Raises: CertsError, one line.
    """
    try:
        from kubernetes import client
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError
    except ImportError as error:
        raise CertsError(
            f"--secrets: {error}; the client of Kubernetes comes with `pip install "
            "'baton[kubernetes]'`"
        ) from error
    store = _Secrets(api or client.CoreV1Api(_connect()), place, namespace_file)
    try:
        return store.renew(hosts, days, servers, flips)
    except ApiException as error:
        raise CertsError(
            f"Secrets {place.prefix}-*: the API server says {error.status} {error.reason}; the "
            "ServiceAccount needs get, create and patch of them"
        ) from error
    except (HTTPError, OSError) as error:
        raise CertsError(f"the API server cannot be reached: {error}") from error


def _connect() -> Any:
    from kubernetes import client

    try:
        configuration, _ = kubernetes_config.load()
    except SettingsError as error:
        raise CertsError(f"--secrets: {error}") from error
    return client.ApiClient(configuration)


class _Secrets:
    """The Secrets of one place."""

    def __init__(self, api: Any, place: Place, namespace_file: Path) -> None:
        self._api = api
        self._place = place
        try:
            self._namespace = place.namespace or namespace_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise CertsError("--namespace: needed outside of a pod") from error

    def renew(
        self, hosts: Sequence[str], days: int, servers: Mapping[str, str], flips: bool
    ) -> list[str]:
        """See `write`."""
        owner = self._owner()
        with tempfile.TemporaryDirectory(prefix="baton-certs-") as name:
            folder = Path(name)
            ca = self._find("ca")
            if ca is not None:
                for file in ("ca.crt", "ca.key"):
                    (folder / file).write_bytes(base64.b64decode(ca.data[file]))
            made = certs.write(folder, hosts=hosts, days=days, servers=servers, flips=flips)
            ca_cert = made.ca_file.read_bytes()
            if ca is None:
                # Before all others: whoever made one at the same time has won, and this set with
                # it is nobody's.
                content = {"ca.crt": ca_cert, "ca.key": (folder / "ca.key").read_bytes()}
                self._create("ca", content, owner)
            names = [*(role.value for role in PeerRole), *servers]
            for each in names:
                content = {
                    "ca.crt": ca_cert,
                    "tls.crt": (folder / f"{each}.crt").read_bytes(),
                    "tls.key": (folder / f"{each}.key").read_bytes(),
                }
                self._put(each, content, owner)
        return [self._place.name(each) for each in names]

    def _owner(self) -> Any:
        if not self._place.owner:
            return None
        found = self._api.read_namespaced_service_account(
            self._place.owner, self._namespace, _request_timeout=TIMEOUT_S
        )
        return {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "name": self._place.owner,
            "uid": found.metadata.uid,
        }

    def _find(self, of: str) -> Any:
        from kubernetes.client.exceptions import ApiException

        try:
            return self._api.read_namespaced_secret(
                self._place.name(of), self._namespace, _request_timeout=TIMEOUT_S
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def _create(self, of: str, content: Mapping[str, bytes], owner: Any) -> None:
        body = self._body(of, content, owner)
        self._api.create_namespaced_secret(self._namespace, body, _request_timeout=TIMEOUT_S)

    def _put(self, of: str, content: Mapping[str, bytes], owner: Any) -> None:
        if self._find(of) is None:
            self._create(of, content, owner)
            return
        self._api.patch_namespaced_secret(
            self._place.name(of),
            self._namespace,
            self._body(of, content, owner),
            _request_timeout=TIMEOUT_S,
        )

    def _body(self, of: str, content: Mapping[str, bytes], owner: Any) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": self._place.name(of),
            "labels": {"app.kubernetes.io/name": "baton"},
        }
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "type": "Opaque",
            "data": {key: base64.b64encode(value).decode() for key, value in content.items()},
        }
