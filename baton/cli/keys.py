"""`baton keys`, `baton api-key` and `baton certs`: keys that sign handles, API keys of clients, and
certificates of processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from baton import api_key_file
from baton.api_key_file import KeyFileError
from baton.cli import options
from baton.cli.options import FILE, RouterTarget, flag, value
from baton.errors import InvalidArgument
from process import api_keys, signing_keys
from process.authorization import PeerRole

_STEPS = {
    "": (signing_keys.rotate, "signs now; the key before it stays valid"),
    "add": (signing_keys.add_next, "is valid now and does not sign yet; next: --step use"),
    "use": (signing_keys.use_next, "signs now; next: --step drop"),
    "drop": (signing_keys.drop_old, "is the only key now"),
}


@options.group("keys")
def keys() -> None:
    """Make or rotate the file of keys that sign the handles of a deployment.

    The setting `handle_keys_file` of every worker names the file, which workers read again when it
    changes. Where all workers read the same file, `rotate` is one step: the new key signs, and the
    old one stays valid. Where each worker has a copy, such as a Kubernetes Secret that is updated
    at different moments, rotate in three steps (`--step add`, `--step use`, `--step drop`), and
    wait after each step until all copies are updated.
    """


@keys.command("new")
@click.argument("file", type=FILE)
def _new(file: Path) -> None:
    """Make a key file that only you can read."""
    key = signing_keys.create(file)
    sys.stdout.write(f"{file}: key {key.key_id}; workers take it as handle_keys_file={file}\n")


@keys.command("rotate")
@click.argument("file", type=FILE)
@value(
    "--step",
    None,
    "Take one of the three steps for a file that workers have copies of.",
    type=click.Choice([step for step in _STEPS if step]),
)
def _rotate(file: Path, step: str | None) -> None:
    """Add a new key to a file; the old one stays valid."""
    change, what = _STEPS[step or ""]
    key = change(file)
    sys.stdout.write(f"{file}: key {key.key_id} {what}\n")


# -- API keys


@options.group("api-key")
def api_key() -> None:
    """Make, list or remove the API keys of clients. A key belongs to a tenant.

    The setting `api_keys_file` of the router names the file, which the router reads again when it
    changes: an added key works at once, and a removed key is refused at once. The file holds
    digests only; a key is shown once, when it is made. The limits of a tenant are in the same file,
    in the table `[tenants.NAME]`: weight, max_requests_per_min, max_tokens_per_min,
    max_queued_requests, max_active_requests.
    """


def _find_file(cluster: str, file: Path | None) -> Path:
    """The file that the options name. Raises: KeyFileError where they name none."""
    if file is not None:
        return file
    state = RouterTarget(cluster=cluster).state
    if state is None or not state.api_keys_file:
        raise KeyFileError("--file: needed; no cluster of yours runs that asks for API keys")
    return Path(state.api_keys_file)


_keys_file = options.as_argument(
    "path",
    _find_file,
    options.cluster_name,
    value(
        "--file",
        "FILE",
        "Use this file. By default it is the file of the cluster that you started last with "
        "`baton up --api-keys`.",
        type=FILE,
        one_of="where",
    ),
)


@api_key.command("add")
@value("--tenant", "NAME", "The tenant that the key belongs to.", required=True)
@flag("--admin", "Let the key see and change the whole cluster, too.")
@value("--min-priority", "N", "The lowest priority of its requests.", -100, type=int)
@value("--max-priority", "N", "The highest priority of its requests.", 0)
@value("--expires", "DATE", "The last day (UTC) on which it is valid, such as 2027-01-31.", "")
@_keys_file
def _add(
    tenant: str, admin: bool, min_priority: int, max_priority: int, expires: str, path: Path
) -> None:
    """Make a key, and show it this one time."""
    key, key_id, entry = api_keys.new_key(
        tenant,
        is_admin=admin,
        min_priority=min_priority,
        max_priority=max_priority,
        expires=expires,
    )
    expires_s = entry.expires_unix_s()
    if expires_s is not None and expires_s <= time.time():
        raise InvalidArgument("--expires", f"{expires} is in the past")
    api_key_file.add(path, key_id, entry)
    sys.stderr.write(f"{path}: key {key_id} of tenant {tenant}; it is not shown again\n")
    sys.stdout.write(f"{key}\n")


@api_key.command("list")
@_keys_file
def _list(path: Path) -> None:
    """Show the keys of a file with tenants, priorities and expiry."""
    for key_id, entry in sorted(api_keys.load(path).keys.items()):
        admin = ", admin" if entry.is_admin else ""
        expires = f", expires {entry.expires}" if entry.expires else ""
        sys.stdout.write(
            f"{key_id}: tenant {entry.tenant}, priority {entry.min_priority} to "
            f"{entry.max_priority}{admin}{expires}\n"
        )


@api_key.command("remove")
@click.argument("key_id")
@_keys_file
def _remove(key_id: str, path: Path) -> None:
    """Remove a key from a file; the router refuses it from then on."""
    api_key_file.remove(path, key_id)
    sys.stdout.write(f"{path}: key {key_id} was removed\n")


# -- certificates


@options.command("certs")
@value("--out", "FOLDER", "Write the certificates into this folder.", type=FILE, one_of="place")
@value(
    "--secrets",
    "PREFIX",
    "Keep the set in Secrets of this Kubernetes cluster.",
    "",
    one_of="place",
)
@value("--namespace", "NAME", "The namespace of the Secrets. By default it is the pod's.", "")
@value("--owner", "NAME", "Let Kubernetes delete the Secrets with this ServiceAccount.", "")
@value(
    "--server",
    "NAME=HOST",
    "Make a certificate for another server, too, such as redis.",
    dest="servers",
    multiple=True,
)
@value(
    "--host",
    "NAME",
    "Clients call the router by this name or address, besides localhost.",
    dest="hosts",
    multiple=True,
)
@value("--days", "N", "The certificates are valid for N days.", 365)
@flag(
    "--flips",
    "Let workers change their role: their certificates name both roles.",
)
def certs(
    out: Path | None,
    secrets: str,
    namespace: str,
    owner: str,
    servers: Sequence[str],
    hosts: Sequence[str],
    days: int,
    flips: bool,
) -> None:
    """Make certificates for development: a CA, and one for each role.

    Run again on the same folder, it renews the certificates and keeps the CA; processes take up the
    new certificates without a restart. `baton up --tls` makes its own set.

    Inside a Kubernetes cluster, `--secrets PREFIX` keeps the set in Secrets: PREFIX-ROLE for each
    role, which the pods mount, and PREFIX-ca, which no pod mounts. The chart does so with
    tls.mode=self-made. Each certificate names one role; with --flips the certificates of workers
    name prefill and decode, so that a running worker may change its role.
    """
    from baton import development_certificates  # cryptography takes a while to import

    if out is None and not secrets:
        raise click.UsageError("Missing option '--out' or '--secrets'.")
    if not 1 <= days <= 3650:
        raise development_certificates.CertsError(f"--days {days}: must be from 1 to 3650")
    named_servers = {}
    for server in servers:
        name, _, host = server.partition("=")
        if not (name and host):
            raise development_certificates.CertsError(f"--server {server}: write it as NAME=HOST")
        named_servers[name] = host
    all_hosts = list(dict.fromkeys([*development_certificates.LOCAL_HOSTS, *hosts]))
    if out is None:
        place = development_certificates.SecretsPlace(secrets, namespace, owner)
        written = development_certificates.write_secrets(
            place, hosts=all_hosts, days=days, servers=named_servers, flips=flips
        )
        sys.stdout.write(f"written: {', '.join(written)}\n")
        return
    made = development_certificates.write(
        out, hosts=all_hosts, days=days, servers=named_servers, flips=flips
    )
    roles = ", ".join(role.value for role in PeerRole)
    sys.stdout.write(
        f"{made.folder}: ca.crt and a certificate for each of {roles}\n"
        "a process takes its own as "
        f"--set tls.ca_file={made.ca_file} "
        f"--set tls.cert_file={made.folder}/ROLE.crt --set tls.key_file={made.folder}/ROLE.key\n"
    )
