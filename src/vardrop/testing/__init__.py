"""The contract that every noisy layer keeps, as functions to run on parts of your own.

for name, check in vardrop.testing.CHECKS.items():
    check(lambda: torch.nn.Linear(4, 3), (torch.randn(5, 4),), my_recipe)
"""

from vardrop.testing.contract import CHECKS, Check, check_layer

__all__ = ["CHECKS", "Check", "check_layer"]
