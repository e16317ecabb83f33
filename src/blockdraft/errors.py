"""The errors a user can meet. Each message is one line that names the field, its value and the remedy."""


class BlockdraftError(Exception):
    """Something went wrong after work had started. The command line ends with exit code 1."""

    exit_code = 1


class InputError(BlockdraftError):
    """Wrong use or wrong input, found before work starts. The command line ends with exit code 2.

    Args:
        field: the flag, setting, file or contract field at fault, in the user's words.
        value: what was found there.
        remedy: what is accepted, or what to do about it.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field}: {value}: {remedy}")
