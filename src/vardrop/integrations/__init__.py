"""Other libraries, one optional file each; none is imported by the rooms below."""
