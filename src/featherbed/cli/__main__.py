"""``python -m featherbed.cli``."""

from featherbed.cli import main

if __name__ == "__main__":
    main()
