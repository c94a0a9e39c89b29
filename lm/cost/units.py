"""Numbers for people: SI prefixes and durations."""

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_DURATIONS = (
    (365.25 * 86400, "years"),
    (86400, "days"),
    (3600, "hours"),
    (60, "minutes"),
    (1, "seconds"),
)


def si(value: float, unit: str = "") -> str:
    """Format a number with three significant digits and an SI prefix.

    >>> si(43_313_160_192, "FLOP"), si(999.6, "B"), si(0, "B"), si(393_219)
    ('43.3 GFLOP', '1.00 kB', '0 B', '393 k')
    """
    if value == 0:
        return f"0 {unit}".strip()
    thousands = 0
    while abs(value) >= 999.5 and thousands < len(_PREFIXES) - 1:
        value /= 1000
        thousands += 1
    return f"{_three_digits(value)} {_PREFIXES[thousands]}{unit}".strip()


def duration(value: float) -> str:
    """Format seconds in the largest unit in which they are at least 1.

    >>> duration(3_199_968), duration(90), duration(0.1)
    ('37.0 days', '1.50 minutes', '0.100 seconds')
    """
    size, unit = next(((size, unit) for size, unit in _DURATIONS if value >= size), _DURATIONS[-1])
    return f"{_three_digits(value / size)} {unit}"


def _three_digits(value: float) -> str:
    """Round to three significant digits, all integer ones and at most three decimals."""
    # a number that is rounded up to 10 or 100 has one decimal less
    decimals = sum(abs(value) < limit for limit in (99.95, 9.995, 0.9995))
    return f"{value:,.{decimals}f}"
