"""The backend that stands for uniattn under a release of vLLM that it does not know. It imports nothing of vLLM."""

from typing import Any

from uniattn.integrations.vllm import releases


class RefusedBackend:
    """Refuses every configuration, so that vLLM stops at start-up with the reason in its own words."""

    @staticmethod
    def get_name() -> str:
        """A name that every release knows."""
        return "CUSTOM"

    @classmethod
    def validate_configuration(cls, **configuration: Any) -> list[str]:
        """The reasons against `configuration`; vLLM puts them into its error."""
        return [releases.unknown_release()]
