"""The Trainer of transformers with the ELBO."""

import copy
import math
import shutil

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset

import vardrop as vd
from tests.integrations.models import MODELS, batch_of, make, without_dropout
from tests.nets import is_same_state
from tests.refusals import assert_refused
from vardrop.integrations.huggingface import from_pretrained, read_noise
from vardrop.integrations.trainer import ELBOTrainer
from vardrop.noisy import noisy_modules


def examples(count=64):
    """Sequences of two kinds, which their first word tells."""
    words = torch.randint(8, 64, (count, 7), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % 2
    words[:, 0] = 5 + labels
    return [{"input_ids": x, "labels": y} for x, y in zip(words, labels, strict=True)]


def sequences(count=16):
    words = torch.randint(3, 64, (count, 7), generator=torch.Generator().manual_seed(0))
    labels = words.clone()
    labels[:, 5:] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(words, labels, strict=True)]


def arguments(folder, **options):
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    size = {"per_device_train_batch_size": 16, "logging_steps": 1}
    return transformers.TrainingArguments(str(folder), **{**quiet, **size, **options})


def trainer_of(folder, recipe=None, data=None, name="bert", **options):
    torch.manual_seed(0)
    model = vd.convert(MODELS[name](), recipe or vd.bayes_by_backprop())
    own = {name: options.pop(name) for name in {"beta", "next_token"} & set(options)}
    data = examples() if data is None else data
    own |= {"train_dataset": data, "eval_dataset": data}
    return ELBOTrainer(model, arguments(folder, **options), **own)


def test_it_trains_on_the_elbo_with_a_warm_up(tmp_path):
    warm_up = vd.linear_warmup(1, 3, beta=1e-3)
    trainer = trainer_of(tmp_path, beta=warm_up, num_train_epochs=12, learning_rate=5e-3)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    logs = [h for h in trainer.state.log_history if "loss" in h]
    assert len(logs) == 48
    for h in logs:
        assert abs(h["loss"] - (h["nll"] + h["beta"] * h["kl"] / 64)) < 1e-4 * h["loss"]
        assert h["beta"] == warm_up(h["epoch"] - 0.25)  # what had been reached before the step
    assert trainer.evaluate()["eval_loss"] < 0.1 < before
    x = torch.stack([e["input_ids"] for e in examples()])
    found = vd.predict(trainer.model, {"input_ids": x}, samples=8, seed=0).probs.argmax(1)
    assert (found == torch.stack([e["labels"] for e in examples()])).float().mean() > 0.9
    assert any(h["kl"] != logs[0]["kl"] for h in logs)


def test_steps_that_are_gathered_count_as_one_batch(tmp_path):
    """The loss of two halves is that of the whole, and of its KL there is one."""
    still = {"recipe": STILL, "learning_rate": 0.0, "num_train_epochs": 1}
    found = []
    for size, steps in ((64, 1), (32, 2)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        trainer = trainer_of(tmp_path, **still, **options)
        without_dropout(trainer.model)
        trainer.train()
        found.append([h for h in trainer.state.log_history if "loss" in h])
    assert len(found[0]) == len(found[1]) == 1
    assert abs(found[0][0]["loss"] - found[1][0]["loss"]) < 1e-5 * found[0][0]["loss"]


def test_weight_decay_leaves_the_noise_alone(tmp_path):
    trainer = trainer_of(tmp_path, recipe=vd.sparse_vd(), weight_decay=0.1)
    names = trainer.get_decay_parameter_names(trainer.model)
    assert "classifier.weight" in names
    assert not [name for name in names if "log_sigma2" in name]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_checkpoints_keep_the_noise(name, tmp_path):
    language = name == "gpt2"
    options = {"name": name, "next_token": language, "data": sequences() if language else None}
    options |= {"num_train_epochs": 1, "learning_rate": 1e-2}
    trainer = trainer_of(tmp_path, **options, save_strategy="epoch")
    trainer.train()
    (folder,) = tmp_path.glob("checkpoint-*")
    kl = vd.kl(trainer.model).detach()
    assert torch.equal(vd.kl(from_pretrained(type(trainer.model), folder)).detach(), kl)
    fresh = trainer_of(tmp_path, **options)
    assert not torch.equal(vd.kl(fresh.model).detach(), kl)
    fresh.train(resume_from_checkpoint=str(folder))  # the epochs are over: it is only loaded
    assert torch.equal(vd.kl(fresh.model).detach(), kl)
    assert is_same_state(fresh.model, trainer.model)


def test_a_model_of_language_is_asked_for_the_next_word(tmp_path):
    still = {"recipe": vd.bayes_by_backprop(log_sigma2=-60.0), "learning_rate": 0.0}
    trainer = trainer_of(tmp_path, **still, name="gpt2", data=sequences(), next_token=True)
    batch, model = trainer.data_collator(sequences()), trainer.model.eval()
    with torch.no_grad():
        mean = model(**batch).loss  # over the words that count: the 2nd to the 5th
        assert abs(trainer.compute_loss(model, batch) - 4 * mean) < 1e-4
    trainer.args.num_train_epochs = 1
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0


STILL = vd.bayes_by_backprop(log_sigma2=-60.0)


def still(name="bert", **config):
    """A model whose noise is too small to see, without dropout."""
    torch.manual_seed(0)
    return without_dropout(vd.convert(make(name, **config), STILL))


def labelled(labels):
    return [{**e, "labels": y} for e, y in zip(examples(len(labels)), labels, strict=True)]


def loss_of(trainer, data):
    """The NLL of all examples, and the loss of the model itself: a mean over labels."""
    batch = trainer.data_collator(data)
    with torch.no_grad():
        model = trainer.model.eval()
        return float(trainer.compute_loss(model, batch)), float(model(**batch).loss)


VALUES = torch.linspace(-1, 2, 16)
SEVERAL = torch.stack([VALUES > 0, VALUES > 1, VALUES < 0], 1).float()


@pytest.mark.parametrize("config, labels, kind, factor", [
    ({}, SEVERAL, vd.Bernoulli, 3),
    ({"problem_type": "multi_label_classification"}, SEVERAL, vd.Bernoulli, 3),
    ({}, torch.arange(16) % 3, vd.Categorical, 1),
], ids=["several", "declared", "classes"])  # fmt: skip
def test_the_likelihood_of_classes_follows_the_labels(config, labels, kind, factor, tmp_path):
    data = labelled(labels)
    trainer = ELBOTrainer(still(**config), arguments(tmp_path, max_steps=2), train_dataset=data)
    ours, theirs = loss_of(trainer, data)  # the cross entropy of transformers
    assert isinstance(trainer.likelihood, kind)
    assert abs(ours - factor * theirs) < 1e-5
    trainer.train()


REGRESSIONS = {
    "one value": ({"num_labels": 1}, VALUES),
    "in a column": ({"num_labels": 1}, VALUES[:, None]),
    "three values": ({"problem_type": "regression"}, torch.stack([VALUES, -VALUES, VALUES], 1)),
}


@pytest.mark.parametrize("learned", [None, vd.Gaussian(std=2.0)], ids=["default", "fixed"])
@pytest.mark.parametrize("config, values", REGRESSIONS.values(), ids=REGRESSIONS)
def test_values_have_a_gaussian_likelihood(config, values, learned, tmp_path):
    data = labelled(values)
    given = {"train_dataset": data, "likelihood": learned}
    trainer = ELBOTrainer(still(**config), arguments(tmp_path, max_steps=2), **given)
    ours, theirs = loss_of(trainer, data)  # the mean squared error of transformers
    count, std = values[0].numel(), trainer.likelihood.std
    expected = count * (theirs / (2 * std**2) + std.log() + 0.5 * math.log(2 * math.pi))
    assert abs(ours - expected) < 1e-4
    trainer.train()
    assert (trainer.likelihood.std != std) == (learned is None)


def test_the_noise_of_values_is_trained_as_in_a_loop(tmp_path):
    """The model stays, so the optimizer fits the deviation alone; two batches make a step."""
    model, data = still(num_labels=1), labelled(VALUES)
    options = {"num_train_epochs": 6, "learning_rate": 0.0, "lr_scheduler_type": "constant"}
    options |= {"optim": "sgd", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    trainer = ELBOTrainer(model, arguments(tmp_path, **options), train_dataset=data)
    trainer.train()
    likelihood = vd.Gaussian(learned=True)
    optimizer = torch.optim.SGD(likelihood.parameters(), lr=1e-2)
    batch = trainer.data_collator(data)
    with torch.no_grad():
        output = model.eval()(batch["input_ids"]).logits.squeeze(-1)
    for _ in range(6):
        optimizer.zero_grad()
        likelihood(output, batch["labels"]).backward()
        optimizer.step()
    torch.testing.assert_close(trainer.likelihood.std, likelihood.std, rtol=1e-5, atol=0)
    assert abs(likelihood.std - 1) > 1e-3


def test_a_checkpoint_keeps_the_noise_of_values(tmp_path):
    options = {"num_train_epochs": 2, "learning_rate": 1e-2, "save_strategy": "epoch"}
    options |= {"per_device_train_batch_size": 4}
    found = []
    for start in (None, str(tmp_path / "checkpoint-4")):
        args = arguments(tmp_path, **options)
        trainer = ELBOTrainer(still(num_labels=1), args, train_dataset=labelled(VALUES))
        trainer.train(resume_from_checkpoint=start)
        found.append({**trainer.model.state_dict(), **trainer.likelihood.state_dict()})
    assert is_same_state(*found)
    other = ELBOTrainer(still(num_labels=3), arguments(tmp_path), train_dataset=examples(16))
    assert_refused(r"\['log_std'\] of", other._load_noise, other.model, *read_noise(start), start)


def test_a_decoder_gets_the_labels_that_are_shifted(tmp_path):
    data = [{**e, "labels": e["input_ids"][:4]} for e in examples(16)]
    args = arguments(tmp_path, num_train_epochs=1)
    trainer = ELBOTrainer(still("t5", dropout_rate=0.0), args, train_dataset=data)
    ours, theirs = loss_of(trainer, data)
    assert abs(ours - 4 * theirs) < 1e-4
    trainer.train()
    whisper = vd.convert(make("whisper"), STILL)
    trainer = ELBOTrainer(whisper, args, train_dataset=data)
    shifted = {**batch_of("whisper", 2), "labels": torch.ones(2, 5, dtype=torch.long)}
    batch = {key: value for key, value in shifted.items() if key != "decoder_input_ids"}
    assert_refused("`decoder_input_ids` in the batch of", trainer.compute_loss, whisper, batch)
    assert trainer.compute_loss(whisper, shifted) > 0


def test_the_best_model_is_loaded_with_its_noise(tmp_path, caplog):
    options = {"num_train_epochs": 2, "save_strategy": "epoch", "eval_strategy": "epoch"}
    trainer = trainer_of(tmp_path, **options, load_best_model_at_end=True, learning_rate=1e-2)
    trainer.train()
    best = from_pretrained(type(trainer.model), trainer.state.best_model_checkpoint)
    assert torch.equal(vd.kl(best).detach(), vd.kl(trainer.model).detach())
    assert "missing keys" not in caplog.text


def test_bad_calls_are_refused(tmp_path):
    args, data = arguments(tmp_path), examples()
    noisy = vd.convert(MODELS["bert"](), vd.bayes_by_backprop())

    def start(model=noisy, args=args, data=data, **options):
        return ELBOTrainer(model, args, train_dataset=data, **options)

    assert_refused("to have noisy modules, but got", start, MODELS["bert"]())
    assert_refused("no `compute_loss_func`", start, compute_loss_func=lambda *_, **__: 0)
    smooth = arguments(tmp_path, label_smoothing_factor=0.1)
    assert_refused("no `label_smoothing_factor`, but got one", start, args=smooth)
    optimizers = torch.optim.SGD(noisy.parameters(), lr=0.1), None
    own = start(likelihood=vd.Gaussian(learned=True), optimizers=optimizers)
    assert_refused("`optimizers` to have the parameters of Gaussian", own.train)

    stream = type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(data)})()
    endless = {"args": arguments(tmp_path, max_steps=1), "data": stream}
    assert_refused("`num_data` for a `train_dataset` without a length", start, **endless)
    start(**endless, num_data=64)
    assert_refused("`beta` to be", start, beta=-1.0)
    batch, compute = {"input_ids": data[0]["input_ids"][None]}, start().compute_loss
    assert_refused("`labels` in the batch, but got input_ids", compute, noisy, batch)
    wrong = {**batch, "labels": torch.tensor([7])}
    assert_refused("to be in 0..2, but got 7..7", compute, noisy, wrong)


def test_checkpoints_of_another_save_or_conversion_are_refused(tmp_path):
    trainer_of(tmp_path, num_train_epochs=2, save_strategy="epoch").train()
    first, second = (tmp_path / f"checkpoint-{step}" for step in (4, 8))
    other = vd.convert(MODELS["bert"](), vd.bayes_by_backprop(), include="classifier")
    again = ELBOTrainer(other, arguments(tmp_path), train_dataset=examples())
    assert_refused("with the noise of .*log_sigma2", again.train, resume_from_checkpoint=str(first))
    assert len(noisy_modules(other)) == 1
    shutil.copy(second / "model.safetensors", first)
    again = trainer_of(tmp_path, num_train_epochs=2)
    before = copy.deepcopy(again.model.state_dict())
    assert_refused("to belong to model.*saves", again.train, resume_from_checkpoint=str(first))
    assert is_same_state(again.model, before)
