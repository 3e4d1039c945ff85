"""``python -m featherbed``: the command line, also for ``torchrun -m featherbed``."""

from featherbed.cli import main

if __name__ == "__main__":
    main()
