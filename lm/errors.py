"""The one exception that is meant for the user: it is printed without a traceback and ends the program with code 2."""


class UserError(Exception):
    """One or more mistakes that the user can mend, each a line saying what is wrong, where, and what would be right."""

    def __init__(self, *problems: str):
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)
