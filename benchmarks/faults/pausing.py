"""Run lm.train and pause before each operation on a file .

    python -m benchmarks.faults.pausing OUT IN ARGUMENTS...

Before each operation a byte is written to the file descriptor OUT, and one is awaited on the file
descriptor IN.
"""

import os
import sys

OPERATIONS = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}


def main(events: int, replies: int, arguments: list[str]) -> int:
    """Run lm.train with these arguments; events and replies are the file descriptors OUT and IN."""
    from lm import train

    workdir = next(a.partition("=")[2] for a in arguments if a.startswith("--workdir="))

    def pause(event: str, args: tuple) -> None:
        writes = (
            event == "open"
            and isinstance(args[2], int)
            and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        # Names relative to an open directory are those of shutil.rmtree.
        relative = event in OPERATIONS and isinstance(args[-1], int) and args[-1] >= 0
        if (writes or event in OPERATIONS) and (relative or str(args[0]).startswith(workdir)):
            os.write(events, b".")
            os.read(replies, 1)

    sys.addaudithook(pause)
    return train.main(arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
