"""Run the command line with `python -m vardrop` or torchrun."""

from vardrop.app.cli import main

if __name__ == "__main__":
    main()
