"""The options of the command line and of TOML files: their names, help and completion."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer import Argument, Option
from typer.core import TyperCommand

import vardrop
from vardrop._core.checks import describe_value, suggest
from vardrop._core.errors import VardropError
from vardrop.app.data import Roles
from vardrop.app.runs import NETS, Settings
from vardrop.app.runs.settings import FEW

Command = TypeVar("Command", bound=Callable[..., None])
# The groups of a long help, the options that matter most first.
_GROUPS = {
    "Main options": "recipes seeds scores target recipe net out epochs beta test seed device "
    "resume",
    "Data": "task drop id weight split group time stratify validation data_dir sep decimal "
    "thousands date_format",
    "Model and method": "option include exclude pretrain heteroscedastic class_weight",
    "Training": "batch_size lr noise_lr weight_decay rate warmup samples clip patience folds "
    "compare precision compile checkpoint_seconds",
}


_NOT_FROM_FILE = ("config", "resume", "help")
_PLAIN = (str, int, float)


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register data sets or methods, also from the working directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    for name in names:
        try:
            import_module(name or " ")
        # A user's module can raise anything. Every error becomes one line with its name.
        except Exception as failure:
            missing = f"{failure.name}." if isinstance(failure, ModuleNotFoundError) else None
            if missing is not None and f"{name or ' '}.".startswith(missing):
                text = f"No module {name!r} is installed or in {here}. Pass its name without .py."
                raise typer.BadParameter(text) from failure
            text = f"Importing {name} failed: {type(failure).__name__}: {failure}. See --debug."
            raise VardropError(text) from failure


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Set the defaults of the options of a command from a TOML file."""
    if path is None or context.resilient_parsing:
        return path
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise typer.BadParameter(f"File not found: {path}.") from None
    except (OSError, ValueError, RecursionError) as broken:
        raise typer.BadParameter(f"Expected {path} to hold TOML, but got: {broken}.") from broken
    import_modules(_to_texts("import", settings.pop("import", []), path))
    options = {p.name: p for p in context.command.params if p.name not in _NOT_FROM_FILE}
    context.default_map = {}
    for key, setting in settings.items():
        option = options.get(name := key.replace("-", "_"))
        if option is None:
            raise typer.BadParameter(f"Unknown option {key!r} in {path}.{suggest(name, options)}")
        texts = _to_texts(key, setting, path, flag=getattr(option, "is_flag", False))
        several = getattr(option, "multiple", False)
        context.default_map[name] = texts if several else ",".join(texts)
    return path


def _to_texts(key: str, setting: object, path: Path, flag: bool = False) -> list[str]:
    """A setting of the file in the form of the command line, so that the option converts it."""
    if isinstance(setting, dict):
        parts = list(setting.values())
        texts = [f"{name}={part!r}" for name, part in setting.items()]
    else:
        parts = setting if isinstance(setting, list) else [setting]
        texts = [str(part) for part in parts]
    if any(isinstance(part, bool) != flag or not isinstance(part, _PLAIN) for part in parts):
        wanted = "true or false" if flag else "a text, a number or a list of them"
        problem = f"Expected {key!r} in {path} to be {wanted}, but got {describe_value(setting)}."
        raise typer.BadParameter(problem)
    return texts


class GroupedCommand(TyperCommand):
    """A command whose help shows the options in groups if there are many."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options of the help."""
        params = {str(param.name): param for param in self.get_params(ctx)}
        groups = {"Arguments": [n for n, p in params.items() if p.param_type_name == "argument"]}
        if "epochs" in params:
            groups |= {title: names.split() for title, names in _GROUPS.items()}
        listed = {name for names in groups.values() for name in names}
        groups["Options"] = [name for name in params if name not in listed]
        for title, names in groups.items():
            records = [params[name].get_help_record(ctx) for name in names if name in params]
            if records:
                with formatter.section(title):
                    formatter.write_dl(list(filter(None, records)))


def complete(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Shell completion of an option among these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def print_version(requested: bool) -> None:
    """Print the version and exit, for --version."""
    if requested:
        print(f"vardrop {vardrop.__version__}")
        raise typer.Exit


MaybePath = Path | None
MaybeText = str | None
MaybeTexts = list[str] | None
Fraction = float | None
_NETS = f"""{", ".join(NETS)}, or hidden widths such as dense-64-32. The default is mlp, and mlp50
for a table of fewer than {FEW} rows."""
_COLUMNS = "with the columns of DATA."
_CONFIG = "A TOML file with options, such as epochs = 20. Command-line options override it."

# The options that several commands have.
RUN = Annotated[Path, Argument(help="The directory of a run.")]
DATA_DIR = Annotated[MaybePath, Option(help="Directory of image sets; VARDROP_DATA by default.")]
JSON = Annotated[bool, Option("--json", help="Print JSON lines.")]
CONFIG = Annotated[MaybePath, Option(help=_CONFIG, callback=read_config, is_eager=True)]
SAMPLES = Annotated[int, Option(help="Draws of the noise.", min=1)]
# The options of commands that train, in addition to the settings.
_TRAINING: dict[str, Any] = {
    "net": Annotated[MaybeText, Option(help=_NETS, autocompletion=complete(NETS))],
    "validation": Annotated[MaybePath, Option(help=f"A file for validation, {_COLUMNS}")],
    "test": Annotated[MaybePath, Option(help=f"A file for the test, {_COLUMNS}")],
    "data_dir": DATA_DIR,
    "include": Annotated[MaybeText, Option(help="Make only layers of this name noisy (a glob).")],
    "exclude": Annotated[MaybeText, Option(help="Leave layers of this name plain (a glob).")],
}


def with_settings(*without: str) -> Callable[[Command], Command]:
    """Add the options of a training, and one per field of `Roles` and `Settings`, to a command.

    Names, types, defaults and help come from the fields. The command takes keyword arguments. An
    option that is not passed is None.

    Args:
        without: fields that get no option.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = dict(_TRAINING)
        for described in (Roles, Settings):
            # The help is the text under `Args` of the docstring.
            text = (inspect.getdoc(described) or "").partition("Args:\n")[2].partition("\n\n")[0]
            helps = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE))
            types = get_type_hints(described)
            for field in dataclasses.fields(described):
                sentence = " ".join(helps[field.name].split())
                options[field.name] = _option(field, types[field.name], sentence)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters += [
            inspect.Parameter(name, keyword, default=None, annotation=option)
            for name, option in options.items()
            if name not in without
        ]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _option(field: dataclasses.Field[Any], kind: Any, text: str) -> Any:
    """The option for a field of this type."""
    by_class = any(get_origin(part) is dict for part in get_args(kind))
    if isinstance(kind, UnionType):  # with None, for an option that was not passed
        kind = get_args(kind)[0]
    default, word = field.default, field.name.replace("_", "-")
    usual = f"{default:g}" if isinstance(default, float) else "on" if default is True else default
    end = "." if default is None or default is False or default == () else f"; {usual} by default."
    text = text[0].upper() + text[1:].rstrip(".") + end
    name = f"--{word}/--no-{word}" if default is True else f"--{word}"
    options: dict[str, Any] = {}
    if by_class:
        kind, options = str, {"parser": _weights, "metavar": "<balanced|a=1,b=10>"}
    elif get_origin(kind) is Literal:
        kind, options = str, {"autocompletion": complete(get_args(kind))}
    elif get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
        kind, text, options = list[str], f"{text} May be repeated.", {"metavar": "<str>"}
    elif get_origin(kind) is tuple:
        kind, options = str, {"parser": _pair, "metavar": "<start,end>"}
    return Annotated[kind | None, Option(name, help=text, **options)]


def _pair(text: str) -> tuple[float, float]:
    """Two numbers with a comma between them."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"Expected two numbers such as 5,20, but got {text!r}.") from None
    return first, second


def _weights(text: str) -> Literal["balanced"] | dict[str, Any]:
    """The word balanced, or numbers by class."""
    wanted = "balanced, or weights by class such as no=1,yes=10"
    return "balanced" if text == "balanced" else assignments(text.split(","), wanted)


@contextmanager
def usage() -> Iterator[None]:
    """Report errors inside as wrong options."""
    try:
        yield
    except VardropError as wrong:
        raise typer.BadParameter(str(wrong)) from wrong


def assignments(texts: Iterable[str], wanted: str) -> dict[str, Any]:
    """Pairs in the form name=value, with a Python literal or a word as the value.

    Args:
        texts: the pairs.
        wanted: describes them in an error.
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, literal = text.rpartition("=")
        if not equals:
            raise typer.BadParameter(f"Expected {wanted}, but got {text!r}.")
        try:
            options[name.strip()] = ast.literal_eval(literal.strip())
        except (ValueError, SyntaxError):
            options[name.strip()] = literal
    return options


def split_names(text: str | None) -> list[str] | None:
    """Names separated by commas; None if the option was not passed."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
