"""Code that every package needs: errors, checks, files, values, calls, sharding."""
