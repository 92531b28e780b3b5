"""The implementations of attention that the bench knows, uniattn first."""

from collections.abc import Sequence

from uniattn.bench.providers.base import Paths, Prepared, Provider
from uniattn.bench.providers.flash_attention import Fa2Package, Fa3Library, Fa3Package, Fa4Package
from uniattn.bench.providers.flashinfer import FlashInfer
from uniattn.bench.providers.ours import Uniattn
from uniattn.bench.providers.pytorch import TorchSdpa, TorchVarlen
from uniattn.bench.providers.vllm_triton import VllmTriton

__all__ = ["Paths", "Prepared", "Provider", "every", "select"]


def every(paths: Paths) -> list[Provider]:
    """All providers, importable or not."""
    return [
        Uniattn(), Fa3Library(paths), Fa3Package(), Fa2Package(), Fa4Package(), FlashInfer(), VllmTriton(paths), TorchVarlen(),
        TorchSdpa(),
    ]  # fmt: skip


def select(keys: Sequence[str], paths: Paths) -> tuple[list[Provider], dict[str, str]]:
    """The providers that `keys` names (none: all) and that can run here, and for the others, by label, why they cannot.

    Raises `ValueError` for a key that no provider has.
    """
    known = {provider.key: provider for provider in every(paths)}
    for key in keys:
        if key not in known:
            raise ValueError(f"{key!r} is no provider; there are {', '.join(known)}")
    wanted = [provider for key, provider in known.items() if not keys or key in keys]
    reasons = {provider.label: provider.available() for provider in wanted}
    return [p for p in wanted if reasons[p.label] is None], {label: why for label, why in reasons.items() if why is not None}
