"""Every failure a caller of the store can meet. No grpc here: `status.py` translates, once."""


class KvStoreError(Exception):
    """Base of all; `reason` is a stable name that goes on the wire and into metrics."""

    reason = "INTERNAL"
    retryable = False


class InvalidArgumentError(KvStoreError):
    """The request contradicts the protocol; fix the caller."""

    reason = "INVALID_ARGUMENT"


class UnknownTrafficClassError(InvalidArgumentError):
    """No such traffic class."""

    reason = "UNKNOWN_TRAFFIC_CLASS"


class NamespaceNotFoundError(KvStoreError):
    """The namespace is not registered, or was dropped."""

    reason = "NAMESPACE_NOT_FOUND"


class NamespaceAmbiguousError(InvalidArgumentError):
    """More than one namespace begins so."""

    reason = "NAMESPACE_AMBIGUOUS"


class NamespaceMismatchError(KvStoreError):
    """Client and server compute different digests of one spec: their versions do not fit."""

    reason = "NAMESPACE_MISMATCH"


class StoreFullError(KvStoreError):
    """No room under the cap, or the disk is full."""

    reason = "STORE_FULL"
    retryable = True


class QuotaExceededError(KvStoreError):
    """A traffic class or tenant holds all it may; names the key that says how much that is."""

    reason = "QUOTA_EXCEEDED"


class OverloadedError(KvStoreError):
    """Too much is waiting already."""

    reason, retryable = "OVERLOADED", True


class NotServingError(KvStoreError):
    """The server is starting or shutting down."""

    reason, retryable = "NOT_SERVING", True


class StorageError(KvStoreError):
    """The disk or the index failed."""

    reason, retryable = "STORAGE_ERROR", True


class DataDirLockedError(KvStoreError):
    """Another server holds the data directory."""

    reason = "DATA_DIR_LOCKED"


class FormatVersionError(KvStoreError):
    """The data directory was written by another version of the format."""

    reason = "FORMAT_VERSION"


class CorruptDataDirError(KvStoreError):
    """A file that nothing can replace is damaged."""

    reason = "DATA_DIR_CORRUPT"


class ForeignSegmentError(KvStoreError):
    """A segment file belongs to another store."""

    reason = "FOREIGN_SEGMENT"


class ConfigError(KvStoreError):
    """The configuration is wrong; names the key."""

    reason = "CONFIG"


class NotADataDirError(ConfigError):
    """What was named as a data directory is something else, or nothing."""

    reason = "NOT_A_DATA_DIR"
