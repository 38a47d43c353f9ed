"""How a command ends: 0 done, 1 failed later, 2 refused before serving.

Exit
├── Refused   2: the input or the machine does not allow it; nothing was left running
└── Failed    1: it began and then broke
"""


class Exit(Exception):
    """Ends the command with one line on stderr and `code`."""

    code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Refused(Exit):
    code = 2


class Failed(Exit):
    code = 1
