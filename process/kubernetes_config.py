"""The connection to Kubernetes' API server, for the official client (`baton[kubernetes]`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from process.settings import SettingsError

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""File in a pod with the pod's own namespace."""

_MAX_CHARS = 200


def own_namespace() -> str:
    """The namespace of this pod; empty outside of one."""
    try:
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def load(context: str = "") -> tuple[Any, str]:
    """Make the configuration of the Kubernetes client: the ServiceAccount of this pod or, where
    there is none, the user's kubeconfig. A context, or KUBECONFIG in the environment, means the
    kubeconfig in any case.

    Args: context: of the kubeconfig; empty: its current one.
    Returns: a `kubernetes.client.Configuration` that retries nothing, and the namespace, empty
        where the pod does not say its own.
    Raises: SettingsError for a missing package or configuration.
    """
    try:
        import yaml
        from kubernetes import client
        from kubernetes import config as untyped_config
    except ModuleNotFoundError:
        raise SettingsError(
            "the Kubernetes client is missing: pip install 'baton[kubernetes]'"
        ) from None
    config: Any = untyped_config
    found = client.Configuration()
    # Looked up here: the client reads the environment only when it is imported.
    named = os.environ.get("KUBECONFIG", "")
    file = named or os.path.expanduser("~/.kube/config")
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ and not (context or named):
            config.load_incluster_config(client_configuration=found)
            namespace = own_namespace()
        else:
            config.load_kube_config(
                config_file=file, context=context or None, client_configuration=found
            )
            contexts, active = config.list_kube_config_contexts(config_file=file)
            chosen = next((each for each in contexts if each["name"] == context), active)
            namespace = str(chosen["context"].get("namespace", "default"))
    except (config.ConfigException, OSError, yaml.YAMLError) as error:
        words = " ".join(str(error).split())[:_MAX_CHARS]
        raise SettingsError(
            "neither in a pod with a service account, nor is there a kubeconfig that works: "
            f"{words}; see `kubectl config`"
        ) from error
    found.retries = False
    return found, namespace
