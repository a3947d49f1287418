"""TLS: the coordinator's certificate, made here or supplied by you, and what agents trust."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom import faults
from fedloom.errors import InputError
from fedloom.files import write_private

RENEW = (
    "Agents trust this certificate. Restore the files from a copy, or use `fedloom agents renew-certificate DIR "
    "--at-once`: agents keep their keys and states, and need new tokens."
)
YEARS = 10  # for which a certificate made here is valid
NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python's ssl module does not name


@dataclass(frozen=True)
class Certificates:
    """The files that a TLS server needs, and the certificate that agents pin."""

    certificate: Path
    key: Path
    authority: bytes  # PEM

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.authority)


def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of a certificate."""
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()


def user_certificate(certificate: Path, key: Path) -> Certificates:
    """Use a certificate that you supply. Agents pin that certificate, not its CA, which signs other ones too."""
    try:
        serialization.load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"The key {key} cannot be used: {error}") from None
    return _in_time(Certificates(certificate, key, first_certificate(certificate)))


def first_certificate(path: Path) -> bytes:
    """Return the first certificate of a file, which agents pin."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())[0].public_bytes(serialization.Encoding.PEM)
    except (OSError, ValueError) as error:
        raise InputError(f"The certificate {path} cannot be used: {error}") from None


def local_authority(folder: Path, names: tuple[str, ...] = (), known: str | None = None) -> Certificates:
    """Return the certificate authority in a folder with a certificate for this machine; make them if missing.

    `known` is the fingerprint that agents trust already.
    """
    files = {name: folder / name for name in ("ca.pem", "server.pem", "server.key")}
    missing = [name for name, file in files.items() if not file.is_file()]
    if missing and known:
        raise InputError(f"{', '.join(missing)} is missing in {folder}. {RENEW}")
    if missing:
        authority, certificate, key = _issue(names)
        write_private(files["server.key"], key)
        write_private(files["server.pem"], certificate + authority)
        write_private(files["ca.pem"], authority)
    made = Certificates(files["server.pem"], files["server.key"], files["ca.pem"].read_bytes())
    try:
        made.fingerprint  # noqa: B018 (raises if it is damaged)
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(made.certificate, made.key)
        served = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    except (ValueError, OSError) as error:
        raise InputError(f"The coordinator's certificate or key in {folder} is damaged: {error}. {RENEW}") from None
    try:
        served.verify_directly_issued_by(x509.load_pem_x509_certificate(made.authority))
    except (ValueError, TypeError, InvalidSignature):
        raise InputError(
            f"ca.pem and server.pem in {folder} do not belong together: ca.pem did not sign server.pem. {RENEW}"
        ) from None
    return _in_time(made)


def _in_time(made: Certificates) -> Certificates:
    """Return certificates that are valid now; raise `InputError` otherwise."""
    if why := clock_problem(made.certificate.read_bytes()):
        raise InputError(f"The certificate {made.certificate} cannot be used: {why}. Renew it, or set the clock right.")
    return made


def clock_problem(pem: bytes) -> str:
    """Say why a certificate is not valid now by this machine's clock; an empty string if it is."""
    certificate = x509.load_pem_x509_certificate(pem)
    now = datetime.datetime.fromtimestamp(faults.clock(), datetime.timezone.utc)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begin <= now <= end:
        return ""
    return f"it is valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}, and this machine's clock says {now:%Y-%m-%d}"


def _issue(names: tuple[str, ...]) -> tuple[bytes, bytes, bytes]:
    """Make an authority that signs exactly one certificate. Its key is never stored."""
    now = datetime.datetime.now(datetime.timezone.utc)
    begin, end = now - datetime.timedelta(days=2), now + datetime.timedelta(days=365 * YEARS)
    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedloom coordinator's own authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedloom coordinator")])

    def certificate(name: x509.Name, key: Any, is_authority: bool, *more: x509.ExtensionType) -> bytes:
        signs = dict.fromkeys(("key_cert_sign", "crl_sign"), is_authority)
        unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
        never = dict.fromkeys((*unused, "encipher_only", "decipher_only"), False)
        usage = x509.KeyUsage(digital_signature=not is_authority, **signs, **never)
        constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
        made = x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number(), begin, end)
        made = made.add_extension(constraints, critical=True).add_extension(usage, critical=True)
        for extension in (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), *more):
            made = made.add_extension(extension, critical=False)
        return made.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority = certificate(issuer, authority_key, True)
    server = certificate(
        subject,
        server_key,
        False,
        x509.SubjectAlternativeName(_names(names)),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
    )
    private = serialization.PrivateFormat.PKCS8
    key = server_key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())
    return authority, server, key


def _names(extra: tuple[str, ...]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for name in dict.fromkeys(("localhost", "127.0.0.1", "::1", socket.gethostname(), *extra)):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(name))
    return found


def trusting(certificates: bytes) -> ssl.SSLContext:
    """Trust these certificates and what they signed, under any name or address of the coordinator and at any time.

    An agent's clock may be wrong, and dates add nothing to a pin: `serve` refuses a certificate that has expired.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # the certificate belongs to one coordinator only: its name adds nothing
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(NO_CHECK_TIME)
    context.load_verify_locations(cadata=certificates.decode())
    return context


def unverified() -> ssl.SSLContext:
    """Trust any certificate: for fetching the one to pin, which is then compared with the token's fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
