"""`python -m fp8patch` is the `fp8patch` command."""

from fp8patch.cli import main

if __name__ == "__main__":
    main()
