"""The exceptions meant for the user: they are printed without a traceback and end the program with code 2."""


class UserError(Exception):
    """One or more mistakes that the user can mend, each a line saying what is wrong, where, and what would be right."""

    code = 2  # the program's exit code

    def __init__(self, *problems: str):
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Passing(UserError):
    """What the same command may not meet again, a disk that failed, another process in the way: launchers try anew."""

    code = 1


class Unavailable(UserError):
    """A text cannot be had for want of a network: the one error that `data.offline` may turn into a notice."""
