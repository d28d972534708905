"""Names of services: 256 bits. What people write is read by the agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, order=True)
class ServiceId:
    """The 256-bit name of a service, most significant bit first."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != 32:
            raise ValueError(f"a serviceID has 32 bytes, not {len(self.raw)}")

    @property
    def authority(self) -> bytes:
        """The block of whoever owns the name: bits 0 to 63. Zero for hosts and their sockets."""
        return self.raw[:8]

    @property
    def tail(self) -> bytes:
        """Bits 96 to 255: a self-certifying tail, a key's hash, or zero."""
        return self.raw[12:]

    def __str__(self) -> str:
        return f"sid:{self.raw.hex()}"


@dataclass(frozen=True, slots=True, order=True)
class Prefix:
    """The leading bits of a name; those beyond `bits` are set to zero."""

    id: ServiceId
    bits: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.bits <= 256:
            raise ValueError(f"a prefix has 0 to 256 bits, not {self.bits}")
        object.__setattr__(self, "id", ServiceId(self._masked(self.id)))

    def _masked(self, id: ServiceId) -> bytes:
        beyond = 256 - self.bits
        return (int.from_bytes(id.raw) >> beyond << beyond).to_bytes(32)

    def __contains__(self, id: object) -> bool:
        return isinstance(id, ServiceId) and self._masked(id) == self.id.raw

    def __str__(self) -> str:
        return f"{self.id}/{self.bits}"


@dataclass(frozen=True, slots=True)
class Name:
    """A name as the agent read it."""

    prefix: Prefix
    written: str

    @property
    def id(self) -> ServiceId:
        """The serviceID (the prefix's bits, then zeros)."""
        return self.prefix.id

    def __str__(self) -> str:
        return self.written


# What may stand for a service: a written name ("web.shop"), or what is known already.
Target: TypeAlias = str | Name | ServiceId | Prefix
