"""The papers' experiments: nets and runs, small enough to read on one screen."""
