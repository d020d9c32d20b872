"""Likelihoods p(y | output), for training and for prediction.

| likelihood                   | output                             | target                   |
|------------------------------|------------------------------------|--------------------------|
| `Categorical`                | logits (N, C, ...)                 | classes (N, ...)         |
| `Categorical(class_axis=-1)` | logits (N, ..., C), as of tokens   | classes (N, ...)         |
| `Bernoulli`                  | logits (N, ...)                    | zeros and ones (N, ...)  |
| `Gaussian`                   | means (N, ...)                     | values (N, ...)          |
| `HeteroscedasticGaussian`    | means, log variances (N, ..., 2 T) | values (N, ..., T)       |
| `Values`                     | values (N, ...)                    | none: it has no density  |

Called as a module, each returns the negative log-likelihood of an example: summed over its targets
(pixels, tokens, outputs) and averaged over the batch. For draws (S, N, ...) it returns their parts
and log E p(y | draw), in log space throughout.
"""

from vardrop.likelihoods.base import Likelihood as Likelihood, Parts as Parts
from vardrop.likelihoods.base import TeacherOutput as TeacherOutput
from vardrop.likelihoods.categorical import Bernoulli as Bernoulli, Categorical as Categorical
from vardrop.likelihoods.categorical import entropy as entropy
from vardrop.likelihoods.continuous import Gaussian as Gaussian, Values as Values
from vardrop.likelihoods.continuous import HeteroscedasticGaussian as HeteroscedasticGaussian
from vardrop.likelihoods.resolve import Objective as Objective, check_model as check_model
from vardrop.likelihoods.resolve import resolve_likelihood as resolve_likelihood
