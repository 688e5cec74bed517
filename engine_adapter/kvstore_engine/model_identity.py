"""Which weights a model has: what tells its KV from that of all others, whatever the model is called."""

from __future__ import annotations

import functools
import hashlib
import re
import time
from pathlib import Path
from typing import Final

import xxhash

from kvstore_client import KVStoreConfigError

# What else than weights decides a layer's output is in the configuration, and a tokenizer only decides which tokens come in. What
# a model sees of an image is its processor's to say, in processor_config.json, preprocessor_config.json or the like.
_CONFIGS: Final = ("config.json", "adapter_config.json", "*processor_config.json")
_FILES: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", *_CONFIGS)
# A file that no loader of weights reads, and that a training run leaves beside them.
_IGNORED: Final = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin", "scheduler.bin"})
# Where the cache of the Hugging Face hub keeps the files of one commit.
_SNAPSHOT: Final = re.compile(r"/snapshots/([0-9a-f]{40})/?$")
_HUB_NAME: Final = re.compile(r"/models--([^/]+)/snapshots/[0-9a-f]{40}/?$")
_READ_BYTES: Final = 4 << 20
_WATCH_S: Final = 1.0  # an engine takes longer to load weights


def model_name(model: str) -> str:
    """What a model is called wherever its files lie: the hub's name of it, or that of its directory or file."""
    path = Path(model)
    if not model or not path.exists():
        return model
    in_hub = _HUB_NAME.search(str(path))
    return in_hub.group(1).replace("--", "/") if in_hub is not None else path.resolve().name


def model_revision(model: str, given: str, *, key: str = "revision", hub_cache: str | None = None) -> str:
    """The revision in a namespace: the one `given`; or the commit of a hub snapshot; or a fingerprint of the model's files.

    Args:
        model: a directory, a file or, of the hub's cache, a name.
        given: by the operator; empty if nothing was.
        key: what the operator calls `given`.
        hub_cache: where the engine has the hub's files; their usual place if None.
    Raises: KVStoreConfigError: IDENTITY_UNKNOWN; nothing was given, and there are no files to tell by.
    """
    if given.strip():
        return given
    path = _path(model, hub_cache)
    commit = _SNAPSHOT.search(str(path))
    if commit is not None:
        return commit.group(1)
    try:
        return weights_fingerprint(path)
    except OSError as error:
        raise KVStoreConfigError(
            "IDENTITY_UNKNOWN",
            f"the weights of model {model!r} cannot be told from others of that name ({error}); set {key!r} to something that "
            "changes whenever they do, such as a commit or a checksum",
        ) from None


def weights_fingerprint(path: Path) -> str:
    """xxh3-128 over names and contents of a model's or an adapter's files, in hex. Remembered until one of them changes.

    Takes a second for several gigabytes if they are in memory, and brings them there for the engine if they are not. Weights are
    no adversary, so the hash need not be a cryptographic one.

    Raises: OSError: there is no such file or directory, or no weights in it.
    """
    files = _files(path)
    if not any(file.suffix != ".json" for file in files):
        raise FileNotFoundError(f"there are no weights at {path}")
    return _fingerprint(_stamps(files))


class WeightsWatch:
    """Whether a model's files still are those of its revision, for a plug that outlives the engine. Any thread may ask."""

    def __init__(self, model: str) -> None:
        """To be made before `model_revision` reads the files, so that no change is overlooked."""
        self._model = model
        self._before = self._look()
        self._next_s = time.monotonic() + _WATCH_S
        self._changed = False

    def changed(self) -> bool:
        """Whether they have changed at any time: looks at most once a second, and costs some file stats then."""
        now_s = time.monotonic()
        if not self._changed and now_s >= self._next_s:
            self._next_s = now_s + _WATCH_S
            files = self._look()
            self._changed = bool(files) and files != self._before  # no engine loads what is gone
        return self._changed

    def _look(self) -> tuple[tuple[Path, int, int], ...]:
        try:
            return _stamps(_files(_path(self._model)))
        except OSError:
            return ()


def config_digest(config: dict[str, object]) -> str:
    """SHA-256 of a model's configuration as the engine runs it, overrides included, in hex: 16 digits."""
    text = repr(sorted((name, repr(value)) for name, value in config.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def _fingerprint(files: tuple[tuple[Path, int, int], ...]) -> str:
    digest = xxhash.xxh3_128()
    for path, size_bytes, _ in files:
        digest.update(f"{len(path.name)}:{path.name}:{size_bytes}:".encode())
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
    return f"xxh3-128:{digest.hexdigest()}"


def _stamps(files: list[Path]) -> tuple[tuple[Path, int, int], ...]:
    stats = [(file, file.stat()) for file in files]
    return tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def _path(model: str, hub_cache: str | None = None) -> Path:
    path = Path(model or "model without a name")
    return path if path.exists() else _hub_snapshot(model, hub_cache) or path


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = {file for pattern in _FILES for file in path.glob(pattern) if file.is_file()}
    return sorted(file for file in found if file.name not in _IGNORED)


def _hub_snapshot(model: str, hub_cache: str | None) -> Path | None:
    """Where the hub's cache has a model's files, without asking the hub."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(model, cache_dir=hub_cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
