"""How many bytes numbers take in a KV cache: plain formats, and formats in which groups of values share a scale of one byte."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A format of KV values.

    Attributes:
        bits: of one value, scales not counted.
        values_per_scale: values that share one scale byte; 0 when there are no scales in the cache.
    """

    name: str
    bits: int
    values_per_scale: int = 0

    def vector_bytes(self, values: int) -> int:
        """Bytes of a vector of that many values with its scales. Raises: ValueError: it does not end on a whole byte or group."""
        if values * self.bits % 8 or (self.values_per_scale and values % self.values_per_scale):
            raise ValueError(
                f"a vector of {values} values does not divide into whole bytes and scale groups of {self.name}"
            )
        scales = values // self.values_per_scale if self.values_per_scale else 0
        return values * self.bits // 8 + scales


# Scales of these, if any, are per tensor or per layer, and with the weights.
PLAIN_FORMATS = {
    form.name: form
    for form in (
        NumberFormat("float32", 32),
        NumberFormat("bfloat16", 16),
        NumberFormat("float16", 16),
        NumberFormat("fp8_e4m3", 8),
        NumberFormat("fp8_e5m2", 8),
        NumberFormat("int8", 8),
    )
}

NVFP4 = NumberFormat("nvfp4", 4, values_per_scale=16)
MXFP4 = NumberFormat("mxfp4", 4, values_per_scale=32)
MXFP8 = NumberFormat("mxfp8", 8, values_per_scale=32)
