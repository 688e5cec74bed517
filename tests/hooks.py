"""Parts of prefix caches that need no store: loads and saves that are over as soon as they begin."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore_engine.hook import LoadedPrefix


@dataclass
class Loaded:
    """A load that has brought what it says."""

    prefix: LoadedPrefix

    def expect(self) -> LoadedPrefix:
        return self.prefix

    def wait_layer(self, _layer: int) -> bool:
        return True

    def wait(self) -> LoadedPrefix:
        return self.prefix

    def cancel(self) -> None:
        pass


class Saved:
    """A save that is done."""

    done = True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True
