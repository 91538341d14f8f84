"""`baton certs`: a set that fits together, keys for nobody else, renewed under the same CA."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509

from baton import cli, development_certificates
from process.authorization import WORKERS, PeerRole, roles_of


def names(path: Path) -> x509.SubjectAlternativeName:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return found.value


@pytest.mark.parametrize("flips", [False, True])
def test_each_role_has_its_own_name_and_no_other(tmp_path: Path, flips: bool) -> None:
    """But workers that may change their role."""
    hosts_of_router = ["localhost", "10.0.0.7", "router.example"]
    made = development_certificates.write(tmp_path / "set", hosts=hosts_of_router, flips=flips)
    for role in PeerRole:
        found = names(made.cert_file(role))
        uris = found.get_values_for_type(x509.UniformResourceIdentifier)
        hosts = found.get_values_for_type(x509.DNSName)
        roles = roles_of(uris)
        assert roles == (WORKERS if flips and role in WORKERS else {role})
        assert {each for each in PeerRole if each.server_name in hosts} == roles
        assert ("router.example" in hosts) is (role is PeerRole.ROUTER)
        assert stat.S_IMODE(made.key_file(role).stat().st_mode) == 0o600
        authority = x509.load_pem_x509_certificate(made.ca_file.read_bytes())
        x509.load_pem_x509_certificate(made.cert_file(role).read_bytes()).verify_directly_issued_by(
            authority
        )
    assert stat.S_IMODE((made.folder / "ca.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700


def test_again_on_the_same_folder_renews_and_keeps_the_ca(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    assert cli.main(["certs", "--out", str(folder), "--host", "a.example"]) == 0
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert cli.main(["certs", "--out", str(folder)]) == 0
    second = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert first.keys() == second.keys()
    same = {name for name in first if first[name] == second[name]}
    assert same == {"ca.crt", "ca.key"}
    assert "PRIVATE" not in capsys.readouterr().out


def test_each_renewal_says_anew_whether_workers_flip(tmp_path: Path) -> None:
    def named() -> set[str]:
        found = names(tmp_path / "set" / "decode.crt")
        return set(found.get_values_for_type(x509.UniformResourceIdentifier))

    for options, uris in (
        ((), {"baton://role/decode"}),
        (("--flips",), {"baton://role/decode", "baton://role/prefill"}),
        ((), {"baton://role/decode"}),
    ):
        assert cli.main(["certs", "--out", str(tmp_path / "set"), *options]) == 0
        assert named() == uris


def test_what_does_not_go_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ca.key").write_text("x")
    (tmp_path / "file").write_text("x")
    for arguments, said in (
        (["--out", str(tmp_path)], "holds half a CA"),
        (["--out", str(tmp_path / "file" / "in")], "Not a directory"),
        (["--out", str(tmp_path / "new"), "--days", "0"], "--days 0"),
        (["--out", str(tmp_path / "new"), "--host", "bücher"], "--host bücher"),
    ):
        assert cli.main(["certs", *arguments]) == 1
        shown = capsys.readouterr().err
        assert said in shown and len(shown.splitlines()) == 1
    assert not (tmp_path / "new").exists()
