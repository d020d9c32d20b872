"""`python -m vardrop.app.cli`, which is what torchrun starts."""

from vardrop.app.cli import main

if __name__ == "__main__":
    main()
