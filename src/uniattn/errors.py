"""The errors that uniattn raises. Each message names the argument, what came, the limit and the fix.

Catch `UniattnError` for all of them. `ArgumentError` is also a `ValueError` and `UnsupportedError` a `NotImplementedError`.
"""


class UniattnError(Exception):
    """Base of every error that uniattn raises on purpose: when it is raised, nothing was launched or written.

    Args:
        argument: name of the argument (or environment variable, or package) at fault, as the caller knows it.
        got: what came.
        limit: what is allowed.
        fix: what to do about it.
    """

    def __init__(self, argument: str, got: object, limit: str, fix: str):
        # All four go to `Exception.args`, so that an error survives pickling on its way out of an engine's worker process.
        super().__init__(argument, str(got), limit, fix)
        self.argument = argument
        self.got = str(got)
        self.limit = limit
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.argument}: got {self.got}; {self.limit}; {self.fix}"


class ArgumentError(UniattnError, ValueError):
    """An argument of a public function is wrong."""


class UnsupportedError(UniattnError, NotImplementedError):
    """A well-formed request that this version, this chip or this machine cannot serve."""
