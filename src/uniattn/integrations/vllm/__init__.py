"""uniattn as an attention backend of vLLM, 0.20 to 0.33.

Nothing needs to be called: the package's entry point in `vllm.general_plugins` makes the backend known in every process of vLLM,
and one flag switches it on::

    vllm serve MODEL --attention-backend CUSTOM

`docs/vllm.md` tells what is supported. How a step runs:

- vLLM's model runner hands each group of layers one batch description; `metadata.py` keeps it, without touching the device;
- each layer's new K/V go into the cache by `uniattn.write_kv`, outside the attention's own call;
- the first layer of a forward pass builds the plan, and the others share it (`steps.py`). That happens on the device, so a CUDA
  graph of the whole pass holds the building too and replays with other lengths;
- `impl.py` calls `uniattn.attention`; `context_parallel.py` does so where the cache is spread over ranks.

What changed between vLLM's releases is in `releases.py` alone.
"""

import logging
from importlib import import_module
from typing import Any

# Below vLLM's own logger, whose handlers show it among the other lines of the start-up.
logger = logging.getLogger("vllm.uniattn")

BACKEND = "uniattn.integrations.vllm.backend.UniattnBackend"
REFUSED = "uniattn.integrations.vllm.refused.RefusedBackend"


def register() -> None:
    """Make the backend known to vLLM as CUSTOM, and as UNIATTN where vLLM lets a plugin add a name (0.32).

    vLLM calls it in each of its processes, some more than once. It never raises, since that would stop every user of vLLM who has
    uniattn installed: under a release that the backend does not know, CUSTOM is a backend that refuses every configuration and
    says why, so that only those hear of it who ask for it.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        logger.warning("uniattn is no attention backend of this vLLM, which has no registry for one: %s", error)
        return
    from uniattn.integrations.vllm import releases

    path = REFUSED if releases.unknown_release() else BACKEND
    register_backend(AttentionBackendEnum.CUSTOM, path)
    if hasattr(AttentionBackendEnum, "register"):
        # Registering a string makes a new member and raises for one that is there; registering a member overrides its class.
        register_backend(getattr(AttentionBackendEnum, "UNIATTN", "UNIATTN"), path)
        # A configuration may reach a new process before that process has loaded its plugins, where the member's value means nothing.
        AttentionBackendEnum["UNIATTN"].__reduce_ex__ = lambda protocol: (named_backend, ())


def named_backend() -> Any:
    """vLLM's member UNIATTN, registered here first: what that member is pickled as."""
    register()
    return import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum["UNIATTN"]


__all__ = ["named_backend", "register"]
