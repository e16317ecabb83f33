"""The errors a user can meet. Each message is one line that names the field, its value and the hint."""

import re

_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # what breaks a line, or cannot be printed
_LONGEST_VALUE = 400


class BlockdraftError(Exception):
    """Something went wrong after work had started. The command line ends with exit code 1."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(_BREAKS.sub(lambda found: found[0].encode("unicode_escape").decode(), message))


class StoppedError(BlockdraftError):
    """Work was stopped before its end, by a signal or a time limit; all of it is saved, and the same command goes on.

    The command line ends with exit code 75, the system's word for "try again" (EX_TEMPFAIL of sysexits.h).
    """

    exit_code = 75


class InputError(BlockdraftError):
    """Wrong use or wrong input, found before work starts. The command line ends with exit code 2.

    Args:
        field: the flag, setting, file or contract field at fault, in the user's words.
        value: what was found there.
        hint: what is accepted, or what to do about it.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, hint: str) -> None:
        self.field, self.value, self.hint = field, value, hint
        shown = str(value)
        if len(shown) > _LONGEST_VALUE:
            shown = f"{shown[: _LONGEST_VALUE // 2]} ... {shown[-_LONGEST_VALUE // 4 :]}"
        super().__init__(f"{field}: {shown}: {hint}")
