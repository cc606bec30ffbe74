"""What goes wrong for a reason that the user can mend."""


class Failure(Exception):
    """Shown as one line, without a traceback."""

    def __init__(self, what: str) -> None:
        super().__init__(" ".join(what.split()))


def reason(error: BaseException) -> str:
    """The first line of what an exception says, without the path that the caller names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
