"""``python -m visacc``."""

from visacc.cli import main

if __name__ == "__main__":
    main()
