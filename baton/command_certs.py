"""`baton certs`: certificates for development: a CA, and one for each role.

Run again on the same folder it renews the certificates and keeps the CA; processes take the new
ones up without a restart. `baton up --tls` makes a set of its own and needs none of this. Inside a
Kubernetes cluster `--secrets PREFIX` keeps the set in Secrets: PREFIX-ROLE for each role, as the
pods mount them, and PREFIX-ca, which nobody does. The chart does so with tls.mode=self-made.
Each certificate names one role; with `--flips` workers' name prefill and decode, so that a running
one may be told to take the other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from process.access import Role


def add_parser(commands: Any) -> None:
    """`baton certs` and its options."""
    parser = commands.add_parser(
        "certs", help="make certificates for development", description=__doc__
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", type=Path, metavar="FOLDER")
    place.add_argument("--secrets", metavar="PREFIX", help="Secrets of the cluster this runs in")
    parser.add_argument("--namespace", metavar="NAME", help="of the Secrets; default: the pod's")
    parser.add_argument(
        "--owner", metavar="NAME", help="ServiceAccount with which the Secrets are to go away"
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=HOST",
        help="a server that is no part of Baton and needs a certificate, such as redis; repeatable",
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name or address under which clients reach the router, besides localhost; "
        "repeatable",
    )
    parser.add_argument(
        "--days", type=int, default=365, metavar="N", help="how long they are valid; default: 365"
    )
    parser.add_argument(
        "--flips",
        action="store_true",
        help="workers may change their role: their certificates name both, and may call what "
        "either may",
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: CertsError."""
    from baton import certs  # cryptography takes a while to import

    if not 1 <= parsed.days <= 3650:
        raise certs.CertsError(f"--days {parsed.days}: must be from 1 to 3650")
    hosts = list(dict.fromkeys([*certs.LOCAL_HOSTS, *parsed.host]))
    servers = dict(_server(each) for each in parsed.server)
    if parsed.secrets:
        return _run_secrets(parsed, hosts, servers)
    made = certs.write(
        parsed.out, hosts=hosts, days=parsed.days, servers=servers, flips=parsed.flips
    )
    roles = ", ".join(role.value for role in Role)
    sys.stdout.write(
        f"{made.folder}: ca.crt and a certificate for each of {roles}\n"
        "a process takes its own as "
        f"--set tls.ca_file={made.ca_file} "
        f"--set tls.cert_file={made.folder}/ROLE.crt --set tls.key_file={made.folder}/ROLE.key\n"
    )
    return 0


def _run_secrets(parsed: argparse.Namespace, hosts: list[str], servers: dict[str, str]) -> int:
    from baton import cert_secrets  # the client of Kubernetes takes a second to import

    place = cert_secrets.Place(parsed.secrets, parsed.namespace or "", parsed.owner or "")
    names = cert_secrets.write(
        place, hosts=hosts, days=parsed.days, servers=servers, flips=parsed.flips
    )
    sys.stdout.write(f"written: {', '.join(names)}\n")
    return 0


def _server(text: str) -> tuple[str, str]:
    from baton import certs

    name, _, host = text.partition("=")
    if not (name and host):
        raise certs.CertsError(f"--server {text}: write it as NAME=HOST")
    return name, host
