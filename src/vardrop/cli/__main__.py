"""`python -m vardrop.cli`, which is what torchrun starts."""

from vardrop_start import main

if __name__ == "__main__":
    main()
