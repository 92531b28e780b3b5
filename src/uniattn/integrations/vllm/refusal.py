"""Refusing a configuration as vLLM does: a ValueError at start-up that names the backend and the reasons."""

from typing import NoReturn


def refuse(*reasons: str) -> NoReturn:
    """Stop vLLM where its own question, `validate_configuration`, came too early to tell: while a layer or a builder is made."""
    raise ValueError(f"Selected backend CUSTOM (uniattn) is not valid for this configuration. Reason: {list(reasons)}")
