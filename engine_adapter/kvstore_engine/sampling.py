"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy: the seed and the limits below then play no part
    top_k: int = 0  # keep only the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of likeliest tokens with at least this probability
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature <= _FLOAT32.max:
            raise ValueError(f"temperature must not be negative, nor infinite, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


class Sampler:
    """One request's sampling state. Its generator is its own, so what a seed yields is independent of the batch."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator().manual_seed(params.seed)

    @property
    def state(self) -> bytes:
        """Where its random numbers are: what `restore` goes on from. Empty for a greedy choice, which draws none."""
        return self._generator.get_state().numpy().tobytes() if self._params.temperature else b""

    def restore(self, state: bytes) -> None:
        """Go on from another sampler's `state`. Raises: ValueError: no sampler of these parameters has such a state."""
        if bool(state) != bool(self._params.temperature):
            raise ValueError(f"a sampler state of {len(state)} bytes at temperature {self._params.temperature:g}")
        if state:
            try:
                self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
            except RuntimeError as error:
                raise ValueError(f"no sampler state: {error}") from None

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor) -> int:
        """Choose a token id from logits of shape (vocab_size,). Greedy ties go to the lowest id."""
        if self._params.temperature == 0:
            return int(logits.argmax())
        probabilities, token_ids = self._candidates(logits)
        choice = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(token_ids[choice])

    def _candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unnormalised probabilities and ids of the tokens that may be chosen, likeliest first."""
        # Relative to the maximum, so that no temperature, however small, makes infinities of likely tokens.
        relative = (logits.float() - logits.max()) / max(float(self._params.temperature), _FLOAT32.tiny)
        scaled, token_ids = relative.sort(descending=True, stable=True)
        if self._params.top_k:
            scaled, token_ids = scaled[: self._params.top_k], token_ids[: self._params.top_k]
        probabilities = scaled.softmax(-1)
        # A token stays while those before it have not reached top_p, so the likeliest always does.
        kept = max(1, int((probabilities.cumsum(-1) - probabilities < self._params.top_p).sum()))
        return probabilities[:kept], token_ids[:kept]
