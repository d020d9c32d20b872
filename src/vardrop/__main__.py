"""`python -m vardrop`, which torchrun starts too."""

from vardrop.app.cli import main

if __name__ == "__main__":
    main()
