"""What every part of the library needs: errors, checks, files, values, calls, sharding."""
