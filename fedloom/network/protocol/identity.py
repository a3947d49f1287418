"""Who is who: a coordinator's own certificate authority, one-time enrolment tokens, and agents' signed requests."""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import ipaddress
import os
import secrets
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom import faults
from fedloom.errors import InputError
from fedloom.files import write_atomically

WINDOW = 120.0  # seconds that a signed request is good for
YEARS = 10
AGENT, TIME, NONCE, SESSION, BODY, SIGNATURE = (
    f"fedloom-{name}" for name in ("agent", "time", "nonce", "session", "body", "signature")
)


# --- files that nobody else may read


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, so that a crash leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    before = os.umask(0o077)
    try:
        write_atomically(path, content)
    finally:
        os.umask(before)


# --- tokens


@dataclass(frozen=True)
class Token:
    """A secret that enrols one agent, and the fingerprint of the certificate authority to trust.

    >>> token = Token(b"s" * 16, "ab" * 32)
    >>> Token.parse(str(token)) == token
    True
    """

    secret: bytes
    fingerprint: str  # empty where there is no TLS

    def __str__(self) -> str:
        raw = self.secret + bytes.fromhex(self.fingerprint)
        return "fl1-" + base64.b32encode(raw).decode().rstrip("=").lower()

    @staticmethod
    def parse(text: str) -> Token:
        text = text.strip()
        try:
            if not text.startswith("fl1-"):
                raise ValueError
            body = text[4:].upper()
            raw = base64.b32decode(body + "=" * (-len(body) % 8))
            if len(raw) not in (16, 48):
                raise ValueError
        except (ValueError, binascii.Error):
            raise InputError(
                "This is no enrolment token. It begins with 'fl1-'; `fedloom serve` prints it, and "
                "`fedloom agents invite` makes more."
            ) from None
        return Token(raw[:16], raw[16:].hex())

    @staticmethod
    def new(fingerprint: str) -> Token:
        return Token(secrets.token_bytes(16), fingerprint)

    @property
    def digest(self) -> str:
        """What the coordinator keeps of it."""
        return hashlib.sha256(self.secret).hexdigest()


# --- TLS


@dataclass(frozen=True)
class Certificates:
    """Files that a TLS server needs, and the certificate that agents pin."""

    certificate: Path
    key: Path
    authority: bytes  # PEM

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.authority)


def fingerprint(pem: bytes) -> str:
    """The SHA-256 of a certificate."""
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()


def given(certificate: Path, key: Path) -> Certificates:
    """Somebody's own certificate: agents pin it, and not its authority, which signs for others as well."""
    try:
        chain = x509.load_pem_x509_certificates(certificate.read_bytes())
        serialization.load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"The certificate {certificate} and the key {key} cannot be used: {error}") from None
    return Certificates(certificate, key, chain[0].public_bytes(serialization.Encoding.PEM))


def local_authority(folder: Path, names: tuple[str, ...] = ()) -> Certificates:
    """The certificate authority in a folder and a certificate for this machine; both are made when they are missing."""
    files = {name: folder / name for name in ("ca.pem", "server.pem", "server.key")}
    if not all(file.is_file() for file in files.values()):
        authority, certificate, key = _issue(names)
        write_private(files["server.key"], key)
        write_private(files["server.pem"], certificate + authority)
        write_private(files["ca.pem"], authority)
    return Certificates(files["server.pem"], files["server.key"], files["ca.pem"].read_bytes())


def _issue(names: tuple[str, ...]) -> tuple[bytes, bytes, bytes]:
    """A new authority that signs exactly one certificate: its own key is forgotten at once."""
    now = datetime.datetime.now(datetime.timezone.utc)
    begin, end = now - datetime.timedelta(days=2), now + datetime.timedelta(days=365 * YEARS)
    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedloom coordinator's own authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedloom coordinator")])
    authority = (
        x509.CertificateBuilder(issuer, issuer, authority_key.public_key(), x509.random_serial_number(), begin, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    known = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    server = (
        x509.CertificateBuilder(issuer, subject, server_key.public_key(), x509.random_serial_number(), begin, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(_names(names)), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(server_key.public_key()), critical=False)
        .add_extension(known, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key = server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return authority.public_bytes(pem), server.public_bytes(pem), key


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names(extra: tuple[str, ...]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for name in dict.fromkeys(("localhost", "127.0.0.1", "::1", socket.gethostname(), *extra)):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(name))
    return found


def pinned(authority: bytes) -> ssl.SSLContext:
    """Trust one certificate and what it signed, under whatever name or address the coordinator is reached."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # the authority signs for one coordinator only: its name adds nothing
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=authority.decode())
    return context


def unverified() -> ssl.SSLContext:
    """For fetching the authority itself, which is then compared with the fingerprint in the token."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


# --- signed requests


def _signed(method: str, path: str, body: str, when: str, nonce: str, session: str) -> bytes:
    return "\n".join(("fedloom 1", method, path, body, when, nonce, session)).encode()


class Signer:
    """An agent's key, kept in a file of mode 0600, and what it knows about the coordinator's clock and session."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raw = Ed25519PrivateKey.generate().private_bytes_raw()
            write_private(path, raw)
        self._key = Ed25519PrivateKey.from_private_bytes(path.read_bytes())
        self.agent = ""
        self.session = ""
        self.offset = 0.0  # seconds that the coordinator's clock is ahead of ours

    @property
    def public(self) -> str:
        return self._key.public_key().public_bytes_raw().hex()

    def mark(self, text: str) -> str:
        """A mark that shows whether something changed, but not what it is: others cannot compute it."""
        return hashlib.sha256(self._key.private_bytes_raw() + text.encode()).hexdigest()

    def headers(self, method: str, path: str, body: str) -> dict[str, str]:
        """What makes a request ours: `body` is the SHA-256 of its body."""
        when, nonce = f"{faults.clock() + self.offset:.3f}", secrets.token_hex(12)
        signature = self._key.sign(_signed(method, path, body, when, nonce, self.session)).hex()
        return {
            AGENT: self.agent,
            TIME: when,
            NONCE: nonce,
            SESSION: self.session,
            BODY: body,
            SIGNATURE: signature,
        }


class Refused(Exception):
    """A request that is not what it claims to be, with a code that the agent understands."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass
class Verifier:
    """Checks signatures, and that no request is seen twice: a session's nonces end with the coordinator's process."""

    session: str = field(default_factory=lambda: secrets.token_hex(16))
    seen: dict[str, float] = field(default_factory=dict)
    swept: float = 0.0

    def check(self, key: str, method: str, path: str, headers: dict[str, str]) -> None:
        """Raise `Refused` unless the owner of the public key made this very request, now and for the first time."""
        try:
            when = float(headers[TIME])
            signature = bytes.fromhex(headers[SIGNATURE])
            public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        except (KeyError, ValueError):
            raise Refused("unsigned", "The request is not signed.") from None
        if not 0 < len(headers.get(NONCE, "")) <= 64:
            raise Refused("unsigned", "The request has no nonce, or one that is too long.")
        named = (headers.get(name, "") for name in (BODY, TIME, NONCE, SESSION))
        try:
            public.verify(signature, _signed(method, path, *named))
        except InvalidSignature:
            raise Refused("signature", "The signature does not belong to this request.") from None
        if headers.get(SESSION) != self.session:
            raise Refused("session", "The request was signed for another session of the coordinator.")
        now = faults.clock()
        if not abs(now - when) <= WINDOW:
            raise Refused("clock", f"The request's time is {now - when:+.0f} s away from the coordinator's clock.")
        if headers[NONCE] in self.seen:
            raise Refused("replayed", "This request was made before.")
        self.seen[headers[NONCE]] = when + 2 * WINDOW
        if now - self.swept > WINDOW:
            self.seen = {nonce: until for nonce, until in self.seen.items() if until > now}
            self.swept = now
