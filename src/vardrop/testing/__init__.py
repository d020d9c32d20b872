"""The contract of every noisy layer, as functions to run on custom layers and recipes.

for name, check in vardrop.testing.CHECKS.items():
    check(lambda: torch.nn.Linear(4, 3), (torch.randn(5, 4),), my_recipe)

`LAYERS`, `RECIPES`, `RECURRENT` and `HEADS` are the table that the library is tested with.
"""

from vardrop.testing.cases import HEADS as HEADS, LAYERS as LAYERS, RECIPES as RECIPES
from vardrop.testing.cases import RECURRENT as RECURRENT, Layer as Layer, cases as cases
from vardrop.testing.contract import CHECKS as CHECKS, Check as Check, check_layer as check_layer
