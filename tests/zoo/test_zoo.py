"""Every model of the zoo works with every verb, or the verb names the reason."""

import pytest

from tests.refusals import assert_refused
from tests.zoo.checks import CHECKS, convert, elbo, mc_dropout, onnx, predict, shrink
from tests.zoo.models import HUGGING, PLAIN, ZOO

# Shares of the weights that are noisy, if not nearly all: experts and convolutions of other classes.
PLAIN_WEIGHTS = {"graph network, own layers": 0.1, "qwen3_moe": 0.3, "bart": 0.8, "wav2vec2": 0.8}
# Models that lose no unit: the code of Mamba and of experts reads weights without calling a layer.
WHOLE = {"mamba", "qwen3_moe", "graph network, own layers"}
REFUSED = {
    "packed lstm": "exportable", "gru": "exportable", "qwen3_moe": "ONNX has|exportable",
    "graph network": "exportable|ONNX has", "graph network, own layers": "exportable|ONNX has",
    "deberta_v2": "never", "whisper": "never",
}  # fmt: skip


def models(names):
    """With `transformers` installed, all of them."""
    missing = pytest.mark.skipif(not _has_transformers(), reason="transformers is not installed")
    return [pytest.param(n, marks=missing if n in HUGGING else ()) for n in names]


def _has_transformers():
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("name", models(ZOO))
def test_models_convert_predict_and_draw_their_dropout(name):
    entry = ZOO[name]
    assert float(convert(entry)) > PLAIN_WEIGHTS.get(name, 0.87)
    assert predict(entry) == "ok"
    assert mc_dropout(entry) in ("ok", "no dropout")


@pytest.mark.slow
@pytest.mark.parametrize("name", models(ZOO))
def test_models_train(name):
    assert elbo(ZOO[name]) == "ok"


@pytest.mark.parametrize("name", [n if n == "resnet" else pytest.param(n, marks=pytest.mark.slow) for n in PLAIN] + [pytest.param(n, marks=pytest.mark.slow) for n in HUGGING])  # fmt: skip
def test_models_shrink(name):
    units = int(shrink(ZOO[name]).split()[0])
    assert (units > 0) == (name not in WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", models(ZOO))
def test_models_shrink_where_noise_prunes(name):
    CHECKS["shrink, noise"](ZOO[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", models(ZOO))
def test_models_are_exported_with_uncertainty(name):
    if name in REFUSED:
        assert_refused(REFUSED[name], onnx, ZOO[name])
    else:
        assert onnx(ZOO[name]) == "draws"
