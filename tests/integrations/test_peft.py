"""PEFT models: the Trainer with the ELBO, and adapters as checkpoints."""

import peft
import pytest
import torch

import vardrop as vd
from tests.integrations.models import MODELS
from tests.integrations.test_trainer import arguments, examples
from tests.nets import is_same_state
from tests.refusals import assert_refused
from vardrop.integrations.huggingface import from_pretrained, save_pretrained
from vardrop.integrations.trainer import ELBOTrainer

WHERE = {"adapter alone": "*lora_*", "adapter and classifier": None}


def base():
    torch.manual_seed(0)
    return MODELS["bert"]()


def adapted(include=None):
    """A model with adapters of rank 2, whose classifier PEFT trains and saves as well."""
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    return vd.convert(peft.get_peft_model(base(), config), vd.bayes_by_backprop(), include=include)


def trainer_of(folder, model, **options):
    options = {"num_train_epochs": 2, "learning_rate": 1e-2, **options}
    return ELBOTrainer(model, arguments(folder, **options), train_dataset=examples(), beta=1e-3)


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_the_trainer_saves_adapters_and_resumes_from_them(where, tmp_path):
    model = adapted(where)
    trainer_of(tmp_path, model, save_strategy="epoch").train()
    middle, last = tmp_path / "checkpoint-4", tmp_path / "checkpoint-8"
    again = adapted(where)
    trainer_of(tmp_path, again).train(resume_from_checkpoint=str(middle))
    assert is_same_state(again, model)
    saved = {path.name: path.stat().st_size for path in last.iterdir()}
    assert "model.safetensors" not in saved
    whole = sum(t.numel() for t in model.state_dict().values()) * 4
    assert saved["adapter_model.safetensors"] + saved["noise.safetensors"] < whole / 4


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_an_adapter_comes_back_with_its_noise(where, tmp_path):
    model = adapted(where)
    trainer_of(tmp_path, model).train()
    save_pretrained(model, tmp_path / "saved")
    again = from_pretrained(base(), tmp_path / "saved")
    assert is_same_state(again, model)
    assert torch.equal(vd.kl(again).detach(), vd.kl(model).detach())
    plain = peft.PeftModel.from_pretrained(base(), tmp_path / "saved").eval()  # finds the means
    x = torch.stack([e["input_ids"] for e in examples()])
    with torch.no_grad():
        assert torch.equal(plain(x).logits, model.eval()(x).logits)


def test_an_adapter_with_means_of_another_save_is_refused(tmp_path):
    model = adapted()
    save_pretrained(model, tmp_path)
    for parameter in model.parameters():
        parameter.data.add_(1)
    model.save_pretrained(tmp_path)  # its own, without the file of the noise
    assert_refused(r"safetensors in .* to belong to adapter", from_pretrained, base(), tmp_path)


def test_the_best_adapter_is_loaded_with_its_noise(tmp_path):
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    model = adapted()
    args = arguments(tmp_path, num_train_epochs=2, learning_rate=1e-2, **options)
    trainer = ELBOTrainer(model, args, train_dataset=examples(), eval_dataset=examples())
    trainer.train()
    assert is_same_state(from_pretrained(base(), trainer.state.best_model_checkpoint), model)
