"""The Trainer of transformers with the ELBO as its objective."""

from __future__ import annotations

from vardrop._core.errors import VardropError, import_optional

import_optional("transformers", "huggingface")

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from vardrop._core.calls import output_tensor
from vardrop._core.checks import check_integer, check_number
from vardrop._core.rng import process_noise
from vardrop.conversion import noise_names
from vardrop.integrations.huggingface import means, read_noise, write_noise
from vardrop.likelihoods import Bernoulli, Categorical, Gaussian
from vardrop.noisy import noisy_modules
from vardrop.objective import ELBO, constant

_LABELS = "labels"
_DECODER_INPUTS = {"decoder_input_ids", "decoder_inputs_embeds"}
# The least learning rate of a noise scale, a few numbers in logarithms: with that of a transformer
# it would take ten thousands of steps to halve.
_NOISE_RATE = 1e-2


class ELBOTrainer(Trainer):
    """The Trainer of transformers that minimises the negative ELBO of a noisy model.

        loss = mean_batch -log p(y | x, w) + beta KL(q || p) / num_data,  w ~ q

    Its arguments are those of the Trainer and, by name, the ones below. Weight decay leaves the
    noise alone, checkpoints keep it, and logs have the parts of the loss. In evaluation the noise
    is off and the loss is the NLL, so that it can be compared whatever beta is. Of several
    processes, every one draws its own noise (see `vardrop._core.rng.process_noise`).

    Args:
        likelihood: of `labels` given the output. By default what the Trainer would take:
            `Gaussian(learned=True)` for `problem_type="regression"` or one label, `Bernoulli()` for
            "multi_label_classification" or labels that are floats, else `Categorical()`, with the
            classes last if there are labels of tokens. Its parameters are trained with the model's,
            and `trainer.likelihood` is what `vardrop.predict` takes afterwards.
        num_data: how many training examples there are; by default the length of `train_dataset`.
        beta: the weight of the KL, or a function of the epoch such as
            `vardrop.linear_warmup(0, 5)`, which a callback follows at every step.
        output: picks the tensor from what the model returns; its `logits` by default.
        next_token: whether the output at a position is about the label of the next one, as in
            models of causal language.

    See docs/huggingface.md for an example.
    """

    loss_is_scaled_for_ga = False

    def __init__(
        self,
        *args: Any,
        likelihood: Callable[[Any, Any], Tensor] | None = None,
        num_data: int | None = None,
        beta: float | Callable[[float], float] = 1.0,
        output: Callable[[Any], Tensor] = output_tensor,
        next_token: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        noisy_modules(self.model)  # an error where there are none
        _check_loss(self.compute_loss_func, self.label_smoother)
        self.model_accepts_loss_kwargs = False
        if likelihood is None and _regresses(self.model):
            likelihood = Gaussian(learned=True)
        self.likelihood: Any = likelihood
        if isinstance(likelihood, nn.Module):
            likelihood.to(self.args.device)
        self._output, self._next = output, next_token
        self._num_data = _length(self.train_dataset) if num_data is None else num_data
        check_integer("num_data", self._num_data)
        schedule = beta if callable(beta) else constant(beta)
        self.beta = schedule(0.0)
        check_number("beta", self.beta, at_least=0)
        self.add_callback(_Steps(self, schedule))
        self._objective: ELBO | None = None
        self._parts: dict[str, Tensor] = {}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The negative ELBO of a batch in training mode, its NLL in evaluation mode."""
        batch = dict(inputs)
        labels = batch.pop(_LABELS, None)
        if labels is None:
            raise VardropError(
                f"Expected `{_LABELS}` in the batch, but got {', '.join(batch)}. Give every "
                "example `label`, or a data collator that makes them."
            )
        batch = _with_decoder_inputs(self.accelerator.unwrap_model(model), batch, labels)
        outputs: list[Any] = []
        elbo = self._elbo(model, labels)

        def pick(parts: Any) -> Tensor:
            outputs.append(parts)
            picked = self._output(parts)
            if self._next:
                return picked[:, :-1]
            one = isinstance(elbo.likelihood, Bernoulli | Gaussian)
            return picked.squeeze(-1) if one and picked.shape == (*labels.shape, 1) else picked

        elbo.output = pick
        with self._process_noise() if model.training else nullcontext():
            parts = elbo(batch, labels[:, 1:] if self._next else labels)
        loss = parts.nll
        if model.training:
            loss = parts.loss
            self._parts = {"nll": parts.nll.detach(), "kl": parts.kl.detach()}
        return (loss, outputs[-1]) if return_outputs else loss

    def _process_noise(self) -> AbstractContextManager[None]:
        """Other noise in every process that gets other batches: the Trainer seeds them alike."""
        mesh = self.accelerator.torch_device_mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        same = math.prod(mesh[name].size() for name in ("tp", "cp") if name in names)
        count = self.args.world_size // same
        return process_noise(self.args.process_index // same, count, self.args.device)

    def _elbo(self, model: nn.Module, labels: Tensor) -> ELBO:
        """The objective of the model as it is wrapped now."""
        if self._objective is None or self._objective.net is not model:
            if self.likelihood is None:
                self.likelihood = _of_classes(self.model, labels)
            self._objective = ELBO(model, self.likelihood, self._num_data)
            self._objective.beta = self._objective.beta.to(labels.device)
        self._objective.set_beta(self.beta)
        return self._objective

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Those of the Trainer without the noise: decay of log sigma^2 would pull it up."""
        noise = {id(t) for m in noisy_modules(model).values() for t in m.noise_tensors()}
        names = {name for name, p in model.named_parameters() if id(p) in noise}
        return [name for name in super().get_decay_parameter_names(model) if name not in names]

    def create_optimizer(self, *args: Any, **options: Any) -> Any:
        """The optimizer of the Trainer, with the parameters of the likelihood."""
        makes = self.optimizer is None
        optimizer: Any = super().create_optimizer(*args, **options)
        there = {id(p) for group in optimizer.param_groups for p in group["params"]}
        learned = [p for p in _parameters(self.likelihood) if id(p) not in there]
        if learned and not makes:
            raise VardropError(
                f"Expected `optimizers` to have the parameters of {self.likelihood!r}, but they "
                "are missing. Add them, or let the Trainer make its optimizer."
            )
        if learned:
            rate = max(self.args.learning_rate, _NOISE_RATE)
            optimizer.add_param_group({"params": learned, "weight_decay": 0.0, "lr": rate})
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """What the Trainer logs, with the parts of the loss of the latest step."""
        if "loss" in logs:
            parts = {name: value.item() for name, value in self._parts.items()}
            logs = {**logs, **parts, "beta": self.beta}
        super().log(logs, *args, **options)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = self.args.output_dir if output_dir is None else output_dir
        model = self.accelerator.unwrap_model(self.model)
        state = model.state_dict() if state_dict is None else state_dict
        super()._save(folder, means(model, state))
        if self.args.should_save:
            learned = {name: p.tolist() for name, p in _named_parameters(self.likelihood)}
            write_noise(model, folder, likelihood=learned)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        noise, values = read_noise(resume_from_checkpoint)  # an error before anything is loaded
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        _fill(self.model if model is None else model, noise, resume_from_checkpoint)
        self._fill_likelihood(values, resume_from_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of what is missing beside the noise, which is in a file of its own."""
        missing, unexpected = load_result
        noise = noise_names(self.model)
        others = type(load_result)([name for name in missing if name not in noise], unexpected)
        super()._issue_warnings_after_load(others)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        noise, values = read_noise(best)
        super()._load_best_model()
        _fill(self.model, noise, best)
        self._fill_likelihood(values, best)

    @torch.no_grad()
    def _fill_likelihood(self, values: Mapping[str, Any], path: Any) -> None:
        parameters, saved = dict(_named_parameters(self.likelihood)), values.get("likelihood", {})
        if parameters.keys() != saved.keys():
            raise VardropError(
                f"Expected `likelihood` to have the parameters {sorted(saved)} of {path}, but got "
                f"{self.likelihood!r}. Give the one that was trained."
            )
        for name, parameter in parameters.items():
            parameter.copy_(torch.tensor(saved[name], dtype=torch.float64))


class _Steps(TrainerCallback):
    """Sets the weight of the KL before every step, and looks after what the model does not have.

    The parameters of the likelihood are no part of the model, whose gradients the Trainer sets to
    zero and DistributedDataParallel averages.
    """

    def __init__(self, trainer: ELBOTrainer, schedule: Callable[[float], float]) -> None:
        self.trainer, self.schedule = trainer, schedule

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Follow the schedule, from the epoch that has been reached."""
        self.trainer.beta = self.schedule(state.epoch or 0.0)
        for parameter in _parameters(self.trainer.likelihood):
            parameter.grad = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Average gradients over processes."""
        for parameter in _parameters(self.trainer.likelihood) if args.world_size > 1 else ():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= args.world_size


def _check_loss(function: Any, smoother: Any) -> None:
    if function is not None or smoother is not None:
        name = "compute_loss_func" if function is not None else "label_smoothing_factor"
        raise VardropError(
            f"Expected no `{name}`, but got one: the loss is the ELBO. Give a `likelihood` of your "
            "own, a function of output and labels."
        )


def _named_parameters(likelihood: Any) -> list[tuple[str, nn.Parameter]]:
    is_module = isinstance(likelihood, nn.Module)
    return list(likelihood.named_parameters()) if is_module else []


def _parameters(likelihood: Any) -> list[nn.Parameter]:
    return [parameter for _, parameter in _named_parameters(likelihood)]


def _generates(model: Any) -> bool:
    """Whether a model is one of language, whatever its config says of labels."""
    return bool(getattr(model, "can_generate", bool)())


def _regresses(model: Any) -> bool:
    """Whether the labels of a model are values, as the Trainer would take them."""
    config = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    one = getattr(config, "num_labels", None) == 1 and not _generates(model)
    return problem == "regression" or (problem is None and one)


def _of_classes(model: Any, labels: Tensor) -> Bernoulli | Categorical:
    """The likelihood of labels that are classes, or a zero or one for each of them."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if problem == "multi_label_classification" or (problem is None and labels.is_floating_point()):
        return Bernoulli()
    return Categorical(class_axis=-1 if labels.dim() > 1 else 1)


def _with_decoder_inputs(model: Any, batch: dict[str, Any], labels: Tensor) -> dict[str, Any]:
    """The batch with labels shifted to the right for a decoder, as the model itself would do."""
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not decodes or not _generates(model) or not _DECODER_INPUTS.isdisjoint(batch):
        return batch
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        raise VardropError(
            f"Expected `decoder_input_ids` in the batch of {type(model).__name__}, but got "
            f"{', '.join(batch)}. Give a data collator that makes them: the labels, shifted to the "
            "right by one place."
        )
    return {**batch, "decoder_input_ids": shift(labels=labels)}


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        raise VardropError(
            f"Expected `num_data` where `train_dataset` has no length, but got "
            f"{type(data).__name__} and none. It is the number of training examples, which scales "
            "the KL."
        ) from None


@torch.no_grad()
def _fill(model: nn.Module, noise: Mapping[str, Tensor], path: Any) -> None:
    """Give the noise of a checkpoint to a model that is noisy in the same way."""
    there = model.state_dict(keep_vars=True)
    if missing := sorted(noise.keys() - there.keys()):
        raise VardropError(
            f"Expected a model with the noise of {path}, but '{missing[0]}' is missing. Convert it "
            "as it was."
        )
    for name, tensor in noise.items():
        there[name].copy_(tensor)
