"""`python -m jaxlowbit`."""

from ._command import main

if __name__ == "__main__":
    main()
