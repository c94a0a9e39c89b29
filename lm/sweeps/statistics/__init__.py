"""Pure functions of numbers: estimates, intervals, tests and corrections, each with its source."""
