"""Plain torch modules that `shrink` produces."""
