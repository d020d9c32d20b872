"""Other libraries, one optional file each. No other package imports them."""
