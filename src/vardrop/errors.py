"""The one error of the library: a message that names the argument, the value and the remedy."""


class VardropError(ValueError):
    """Raised for bad input, in the form "Expected `x` to ..., but got .... Remedy."."""


class UnregisteredKLError(VardropError):
    """No KL divergence is registered for this pair of posterior and prior."""
