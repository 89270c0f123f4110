"""The one tree of errors.

A miss is a value and never raises. Whatever raises one of these left the node as it was before the
call. The server translates each class to one gRPC status code and the client translates it back
(`kvtier/server/errors.py`, `kvtier/client/stub.py`); a bug is an assertion and not in this tree.
"""

from __future__ import annotations


class KvtierError(Exception):
    """Base of every fault that kvtier raises; the message says what to do about it."""


class ConfigError(KvtierError):
    """A configuration value is not allowed: names the field, the value and what is allowed."""


class InvalidRequest(KvtierError):
    """The caller sent something malformed: wrong lengths, impossible sizes, unknown enum values."""


class UnknownId(KvtierError):
    """The lease, reservation, parent, engine or layout that was named is not here."""


class Conflict(KvtierError):
    """What was asked contradicts what is registered, or belongs to somebody else."""


class ProtocolMismatch(Conflict):
    """Client and node speak different protocol versions."""


class LimitExceeded(KvtierError):
    """A named bound (engines, leases, keys a call, message bytes) would be passed."""


class ResourceShortage(KvtierError):
    """The machine lacks what the configuration asks for: memory, /dev/shm, disk, ports."""


class AlreadyRunning(KvtierError):
    """A live daemon owns the data directory, the socket or the port."""


class Unavailable(KvtierError):
    """The node cannot be reached, or it restarted and no longer knows this engine."""


class DeadlineExceeded(Unavailable):
    """The node did not answer within the call's deadline."""


class Corruption(KvtierError):
    """Bytes do not have the checksum they were committed with."""


class TierFault(KvtierError):
    """A medium failed to read, write or delete: nothing is known of the slots that were named."""


class IndexFault(Unavailable):
    """The index cannot be reached or did not answer in time: nothing is known of other nodes."""


class Fenced(KvtierError):
    """A younger daemon of this node's identity is registered: this one must stop serving."""


class TransferFault(KvtierError):
    """Bytes did not arrive from a peer; nothing writes to their destination any more."""
