"""The connection to Kubernetes' API server, for the official client (`baton[kubernetes]`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from process.settings import SettingsError

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Holds a pod's own namespace."""

_MAX_CHARS = 200


def load(context: str = "") -> tuple[Any, str]:
    """As the user's kubeconfig says or, inside a pod without one, its ServiceAccount.

    Args: context: of the kubeconfig; empty: its current one.
    Returns: a `kubernetes.client.Configuration` that retries nothing, and the namespace.
    Raises: SettingsError for a missing package or configuration.
    """
    try:
        from kubernetes import client
        from kubernetes import config as untyped_config
    except ModuleNotFoundError:
        raise SettingsError(
            "the Kubernetes client is missing: pip install 'baton[kubernetes]'"
        ) from None
    config: Any = untyped_config
    found = client.Configuration()
    # Looked up here: the client reads the environment only when it is imported.
    file = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
    has_file = "KUBECONFIG" in os.environ or Path(file).exists()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ and not (context or has_file):
            config.load_incluster_config(client_configuration=found)
            namespace = NAMESPACE_FILE.read_text(encoding="utf-8").strip()
        else:
            config.load_kube_config(
                config_file=file, context=context or None, client_configuration=found
            )
            contexts, active = config.list_kube_config_contexts(config_file=file)
            chosen = next((each for each in contexts if each["name"] == context), active)
            namespace = str(chosen["context"].get("namespace", "default"))
    except (config.ConfigException, OSError) as error:
        words = " ".join(str(error).split())[:_MAX_CHARS]
        raise SettingsError(
            "neither in a pod with a service account, nor is there a kubeconfig that works: "
            f"{words}; see `kubectl config`"
        ) from error
    found.retries = False
    return found, namespace
