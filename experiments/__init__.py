"""The papers' experiments, a file for each paper, run by `vardrop reproduce` in a clone."""
