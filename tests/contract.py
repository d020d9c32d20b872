"""The one table of layers and recipes; a new recipe is one more row."""

import torch
from torch import nn

import vardrop as vd

LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (torch.randn(5, 6),)),
    "linear_sequence": (lambda: nn.Linear(6, 4, bias=False), (torch.randn(5, 3, 6),)),
    "linear_unbatched": (lambda: nn.Linear(6, 4), (torch.randn(6),)),
    "bilinear": (lambda: nn.Bilinear(4, 3, 5), (torch.randn(6, 4), torch.randn(6, 3))),
    "embedding": (lambda: nn.Embedding(7, 4), (torch.randint(7, (5, 3)),)),
    "embedding_padding": (
        lambda: nn.Embedding(7, 4, padding_idx=0),
        (torch.tensor([[0, 1], [2, 3]]),),
    ),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), (torch.randn(3, 4, 8),)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2), (torch.randn(3, 4, 9, 9),)),
    "conv2d_reflect": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        (torch.randn(2, 2, 5, 5),),
    ),
    "conv2d_depthwise": (
        lambda: nn.Conv2d(4, 8, 3, padding="same", groups=4, bias=False),
        (torch.randn(2, 4, 5, 5),),
    ),
    "conv2d_unbatched": (lambda: nn.Conv2d(2, 3, 3), (torch.randn(2, 5, 5),)),
    "conv3d": (
        lambda: nn.Conv3d(2, 3, 2, padding=1, padding_mode="circular"),
        (torch.randn(2, 2, 3, 3, 3),),
    ),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (torch.randn(2, 4, 5),)),
    "transposed2d": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
        (torch.randn(2, 3, 4, 4),),
    ),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (torch.randn(2, 2, 3, 3, 3),)),
}

WEIGHT_RECIPES = {
    "bayes_by_backprop": vd.bayes_by_backprop(),
    "bbb_weight_sample": vd.bayes_by_backprop(estimator=vd.weight_sample),
    "bbb_per_example": vd.bayes_by_backprop(estimator=vd.per_example),
    "bbb_flipout": vd.bayes_by_backprop(estimator=vd.flipout),
    "bbb_mixture": vd.bayes_by_backprop(vd.MonteCarlo(vd.ScaleMixture(), samples=2)),
    "bbb_student": vd.bayes_by_backprop(vd.StudentT(3.0)),
    "bbb_learned_prior": vd.bayes_by_backprop(vd.Normal(learned=True)),
    "bbb_pretrained_prior": vd.bayes_by_backprop(vd.Normal(mean="pretrained", std=0.1)),
    "bbb_noisy_bias": vd.Recipe(vd.AdditiveGaussian(), vd.Normal(), noisy_bias=True),
    "no_prior": vd.Recipe(vd.AdditiveGaussian(log_sigma2=-3.0)),
    "gaussian_dropout_b": vd.gaussian_dropout(0.5, kind="B"),
    "vd_b_weight": vd.variational_dropout("B", per="weight"),
    "vd_b_input": vd.variational_dropout("B", per="input"),
    "vd_b_output": vd.variational_dropout("B", per="output", prior=vd.ARD()),
    "vd_b_layer": vd.variational_dropout(
        "B", per="layer", max_alpha=1.0, prior=vd.LogUniform("cubic")
    ),
    "sparse_vd": vd.sparse_vd(),
    "sparse_vd_sigmoid": vd.sparse_vd(form="sigmoid"),
    "ard": vd.ard(),
    "variance_gaussian": vd.variance_layer(),
    "variance_sign": vd.variance_layer("sign"),
    "variance_uniform": vd.variance_layer("uniform"),
    "dropconnect": vd.dropconnect(0.3),
    "dropout_as_weights": vd.Recipe(
        vd.posteriors.Bernoulli(0.3, per="input"), vd.Normal(), vd.per_example
    ),
}

GATE_RECIPES = {
    "gaussian_dropout_a": vd.gaussian_dropout(0.5, kind="A"),
    "vd_a": vd.variational_dropout("A"),
    "vd_a2_layer": vd.variational_dropout("A2", per="layer"),
    "binary_dropout": vd.binary_dropout(0.3),
}
