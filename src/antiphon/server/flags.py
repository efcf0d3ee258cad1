"""A command whose flags are the options of the settings, one each. Shown by tests/server/test_serve.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated

import typer

from antiphon.server.settings import ServerSettings, allowed, as_text, flag, options

Command = Callable[[Path | None, Mapping[str, str | None]], None]
"""Takes the configuration file and the flags by option; None is one that was not given."""


def with_flags(command: Command) -> Callable[..., None]:
    """The command as typer takes it."""

    def run(config: Path | None, **flags: str | None) -> None:
        command(config, flags)

    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    file = Annotated[Path | None, typer.Option(metavar="FILE", help="Options in YAML; environment and flags win.")]
    parameters = [Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=file)]
    parameters += [
        Parameter(option, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, _flag(option)])
        for option in options()
    ]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # read by inspect, and so by typer
    return run


def _flag(option: str) -> object:
    field = ServerSettings.model_fields[option]
    # A default that follows from other options is told by the description.
    default = False if field.default_factory is not None else as_text(field.default)
    return typer.Option(flag(option), metavar=f"<{allowed(option)}>", help=field.description, show_default=default)
