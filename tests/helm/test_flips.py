"""Whose certificates name two roles: workers' where one may be told to flip, and nobody else's."""

from __future__ import annotations

import itertools

import pytest

from baton import cli
from process.authorization import WORKERS, PeerRole, roles_of
from tests.helm.conftest import Objects, Render, containers, of_kind, pod_specs

MANAGER = ("tls.mode=cert-manager", "tls.certManager.issuerRef.name=ca")
FLIPS = "scaling.by=autoscaler"
NO_FLIPS: tuple[tuple[str, ...], ...] = (
    (),
    ("scaling.by=hpa",),
    ("scaling.by=autoscaler", "autoscaler.settings.allow_flips=false"),
    # The autoscaler takes no worker for one with other devices.
    ("scaling.by=autoscaler", "decode.gpus=2", "decode.settings.engine.tensor_parallel=2"),
)


def named(objects: Objects) -> dict[str, tuple[list[str], list[str]]]:
    """URIs and DNS names that cert-manager is asked for, by role."""
    return {
        name.removeprefix("baton-tls-"): (each["spec"].get("uris", []), each["spec"]["dnsNames"])
        for name, each in of_kind(objects, "Certificate").items()
    }


def arguments_of_job(objects: Objects) -> list[list[str]]:
    """Of the job of this revision, and of the schedule's."""
    found = [
        containers(pod)["certs"]["args"]
        for name, pod in pod_specs(objects).items()
        if "baton-certs" in name
    ]
    assert len(found) == 2
    return found


@pytest.mark.parametrize("values", [(FLIPS,), (FLIPS, "prefill.gpus=1", "decode.gpus=1")])
def test_workers_that_may_be_flipped_have_both_roles(
    render: Render, values: tuple[str, ...]
) -> None:
    for role, (uris, hosts) in named(render(*MANAGER, *values)).items():
        if role == "redis":
            assert not uris
            continue
        roles = WORKERS if PeerRole(role) in WORKERS else {PeerRole(role)}
        assert roles_of(uris) == roles
        assert set(hosts) == {each.server_name for each in roles}
    for arguments in arguments_of_job(render("tls.mode=self-made", *values)):
        assert "--flips" in arguments


@pytest.mark.parametrize("values", NO_FLIPS)
def test_everybody_else_has_one(render: Render, values: tuple[str, ...]) -> None:
    for role, (uris, hosts) in named(render(*MANAGER, *values)).items():
        if role != "redis":
            assert roles_of(uris) == {PeerRole(role)} and hosts == [PeerRole(role).server_name]
    for arguments in arguments_of_job(render("tls.mode=self-made", *values)):
        assert "--flips" not in arguments


def test_the_job_says_what_the_command_takes(
    render: Render, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["certs", "--help"]) == 0
    known = capsys.readouterr().out
    everything = arguments_of_job(render("tls.mode=self-made", FLIPS))
    for argument in itertools.chain.from_iterable(everything):
        assert argument.partition("=")[0] in known
