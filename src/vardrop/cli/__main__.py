"""`python -m vardrop.cli`, which is what torchrun starts."""

from vardrop.cli import main

if __name__ == "__main__":
    main()
