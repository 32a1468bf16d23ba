# SPDX-License-Identifier: Apache-2.0
"""Load custom code, named in a config as `package.module:Name` or `file.py:name`.

Called only with names from the user's own config or command line, never from the files of a run or checkpoint.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from evoalign.errors import ConfigError, plain

FAILURES = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions that count as failures of custom code: all but Ctrl-C. sys.exit() must not end a run as if it were
done."""
MOST_NAMES = 12
"""Most names of a module that an error lists."""
_NOT_OWN = (Path(__file__).parent, Path(asyncio.__file__).parent)


def described(error: BaseException) -> str:
    """Return an exception's type and text on one printable line, shortened and with secrets redacted, as in addresses.

    Its text often quotes a completion, whose control characters would reach the terminal.
    """
    from evoalign.config.secrets import redacted  # imports the config, which a process of one episode does without

    text = plain(" ".join(redacted(str(error)).split()))
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def raised(error: BaseException) -> str:
    """Describe an exception of custom code, with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(place in Path(f.filename).parents for place in _NOT_OWN)]
    if not own:
        return described(error)
    # The deepest line of the file that was called; below it are libraries.
    last = next(frame for frame in reversed(own) if frame.filename == own[0].filename)
    return f"{described(error)} in {Path(last.filename).name} line {last.lineno}"


def load_object(path: str, what: str) -> Any:
    """Load the object that a path names. `what` is the setting, for the error. Raises ConfigError."""
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{what}: {path!r} is not an import path; write package.module:Name or file.py:name")
    module = (
        _from_file(Path(module_name), what) if module_name.endswith(".py") else _from_name(module_name, attribute, what)
    )
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{what}: {module_name} has no {attribute!r}{_there(module)}") from None


def _there(module: ModuleType) -> str:
    """List the functions and classes that a module defines."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    names = [name for name in own if not name.startswith("_") and callable(vars(module)[name])]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"; there are {', '.join(names[:MOST_NAMES])}{more}" if names else "; no function or class is defined there"


def own_settings(
    given: Mapping[str, Any], model: type[BaseModel] | None, section: str, common: Collection[str] = ()
) -> Any:
    """Check the custom settings of a config's section with `model`, or return them as they are without one.

    `common` are the section's built-in settings: an undeclared name close to one of them is refused as a typing error.
    Raises ConfigError.
    """
    known = () if model is None else tuple(info.alias or name for name, info in model.model_fields.items())
    declared = model is not None and model.model_config.get("extra") != "allow"
    for name in given:
        near = difflib.get_close_matches(name, [*known, *common], n=1, cutoff=0.6 if declared else 0.8)
        if name in known or not (declared or near):
            continue
        names = ", ".join(sorted([*known, *common])) or "nothing"
        hint = f"did you mean {section}.{near[0]}?" if near else f"known here: {names}"
        raise ConfigError(f"unknown setting {section}.{name}; {hint}")
    try:
        return dict(given) if model is None else model.model_validate(dict(given))
    except ValidationError as error:
        wrong = [(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
        raise ConfigError("\n".join(f"{section}.{where}: {what}" for where, what in wrong)) from None


@contextmanager
def _exit_raises() -> Generator[None]:
    """Turn a call of os._exit into an error while custom code is imported: the command would end as if it were done."""
    end, pid = os._exit, os.getpid()

    def refused(status: int) -> NoReturn:
        if os.getpid() != pid:  # a child process that it started
            end(status)
        raise SystemExit(f"it called os._exit({status})")

    os._exit = refused
    try:
        yield
    finally:
        os._exit = end


def _from_name(name: str, attribute: str, what: str) -> ModuleType:
    try:
        with _exit_raises():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        file = f"{name}.py"
        hint = f"for the file, write {file}:{attribute}" if error.name == name and Path(file).is_file() else (
            "is it installed or on PYTHONPATH?"
        )  # fmt: skip
        raise ConfigError(f"{what}: no module named {error.name!r}; {hint}") from None
    except FAILURES as error:  # custom code runs while it is imported
        raise ConfigError(f"{what}: {name} fails to import: {described(error)}") from error


def _from_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{what}: no file {path} (looked from {Path.cwd()}); start the command where it is")
    name = f"evoalign_user_{path.stem}_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _exit_raises():
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, FAILURES):
            raise
        raise ConfigError(f"{what}: {path} fails to import: {described(error)}") from error
    return module
