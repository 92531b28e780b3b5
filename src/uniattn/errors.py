"""The errors that uniattn raises. Each message names the argument, what came, the limit and the fix."""


class UniattnError(Exception):
    """Base of every error that uniattn raises on purpose."""


class ArgumentError(UniattnError, ValueError):
    """An argument of a public function is wrong: nothing was launched or written.

    Args:
        argument: name of the argument at fault, as the caller wrote it.
        got: what came.
        limit: what is allowed.
        fix: what to do about it.
    """

    def __init__(self, argument: str, *, got: object, limit: str, fix: str):
        super().__init__(f"{argument}: got {got}; {limit}; {fix}")
        self.argument = argument


class UnsupportedError(UniattnError, NotImplementedError):
    """A well-formed request that this version, this chip or this machine cannot serve."""

    def __init__(self, argument: str, *, got: object, limit: str, fix: str):
        super().__init__(f"{argument}: got {got}; {limit}; {fix}")
        self.argument = argument
