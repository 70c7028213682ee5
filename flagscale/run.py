"""The command line: compose -> check -> plan -> dispatch.

    python run.py [--config-name NAME] [--config-path FOLDER] [section.key=value ...]

Exit code: the job's; 2 for a mistake of the user, which is one message on stderr.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.config.errors import UserError, UserErrors

if TYPE_CHECKING:
    from flagscale.config.loading import Loaded

DESCRIPTION = """\
Train a vision-language model whose vision encoder and language model share ranks but not a layout.

  action=run      start the job (default)      action=stop     end a detached job
  action=dryrun   show and write the plan      action=query    state of a job
  action=test     a few iterations, thrown away
  action=explain key=model.seq_length          meaning of a key, and where it is set
  action=explain key=model                     all keys of a section; without key=, the sections

  -m section.key=a,b,c   one run after another for every combination of the values, and a table at the end

Any key can be set as section.key=value, a group of alternatives as group=choice (such as model=qwen35_tiny).
Relative paths start at the working folder here, and in YAML files at the project folder of the file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        return _main(sys.argv[1:] if argv is None else list(argv))
    except UserErrors as errors:
        return _refuse([str(error) for error in errors.errors])
    except UserError as error:
        return _refuse([str(error)])
    except KeyboardInterrupt:
        return _refuse(["interrupted"], 128 + signal.SIGINT)
    except BrokenPipeError:
        _drop_output()  # `run.py ... | head`: nobody reads any more
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            _drop_output()
            return _refuse([f"the output cannot be written: {error.strerror}; make room, or send it elsewhere"])
        if error.filename is None:
            raise
        return _refuse([f"{error.filename}: {error.strerror}; correct the path, its permissions, or the disk"])


def _main(argv: list[str]) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working folder no longer exists; change into one that does") from None
    arguments, overrides = _parse(argv)
    from flagscale.config.loading import load

    key, overrides = _taken(overrides, "key")
    key = key if arguments.help_key is None else arguments.help_key
    config_path = _config_folder(arguments.config_path)
    if arguments.multirun:
        if key is not None:
            raise UserError(f"-m: starts runs and explains no key; leave out -m, or the key {key!r}")
        return _sweep(arguments.config_name, config_path, overrides)
    loaded = load(arguments.config_name, config_path, overrides)
    action = "explain" if arguments.help_key is not None else loaded.config.action
    if action == "explain":
        from flagscale.config.explain import explain

        sys.stdout.write(explain(key, loaded))
        return 0
    if action == "auto_tune":
        raise UserError(
            "action=auto_tune: automatic tuning does not exist yet; compare settings with a sweep, such as "
            "`-m model.vision_micro_batch_size=2,4,8`"
        )
    if key is not None:
        raise UserError(f"command line 'key={key}': is for action=explain, but the action is {action}; leave one out")
    return _dispatch(loaded, action)


def _dispatch(loaded: Loaded, action: str) -> int:
    from flagscale.runner import attend, dispatch, preview

    if action in ("stop", "query"):
        # Unchecked: a running job must stay within reach when its data or the layout in the YAML has changed since.
        return attend(loaded.config, action)

    from flagscale.plan.build import checked_plan
    from flagscale.plan.notes import notes
    from flagscale.plan.report import show_plan
    from flagscale.runner.render import torchrun_command

    plan = checked_plan(loaded, torchrun_command)
    show_plan(plan, notes(loaded, plan))
    if action == "dryrun":
        sys.stdout.write(preview(plan))
        return 0
    return dispatch(plan, action)


def _sweep(config_name: str, config_path: Path | None, overrides: list[str]) -> int:
    """A run for each combination of the overrides' values; all are checked before the first one starts."""
    from flagscale.config.layers import parse_overrides
    from flagscale.config.loading import load
    from flagscale.plan.build import checked_plan
    from flagscale.runner import sweep
    from flagscale.runner.progress import Console
    from flagscale.runner.render import torchrun_command

    variants = sweep.variants(parse_overrides(overrides, sweep=True))
    folder, runs, errors = None, [], []
    for variant in variants:
        try:
            loaded = load(config_name, config_path, list(variant.overrides))
            folder = folder or Path(loaded.config.experiment.exp_dir)
            runs.append(sweep.placed(loaded, folder / variant.name))
            checked_plan(runs[-1], torchrun_command)
        except UserError as error:
            errors += [UserError(f"-m: {variant.name}: {single}") for single in getattr(error, "errors", (error,))]
    if errors or folder is None:
        raise UserErrors(errors)
    names, action = [variant.name for variant in variants], runs[0].config.action
    return sweep.run_all(names, lambda number: _dispatch(runs[number], action), folder, Console(sys.stdout))


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="run.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config-name", "-cn", default=None, metavar="NAME", help="YAML file, without .yaml")
    parser.add_argument("--config-path", "-cp", default=None, metavar="FOLDER", help="folder of your own YAML files")
    parser.add_argument("--help-key", default=None, metavar="KEY", help="explain a key, as action=explain key=KEY does")
    parser.add_argument("--multirun", "-m", action="store_true", help="a run for every combination of key=a,b,c")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that win over the YAML files")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.config_name and (arguments.config_name.startswith("/") or ".." in arguments.config_name.split("/")):
        raise UserError(
            f"--config-name {arguments.config_name}: is a path; write --config-path FOLDER --config-name NAME"
        )
    if arguments.config_name is None:
        if arguments.config_path is not None:
            from flagscale.config.layers import Composer

            names = Composer(_config_folder(arguments.config_path)).names()
            raise UserError(
                f"--config-name is missing; {arguments.config_path} and the shipped folder have: {', '.join(names)}"
            )
        arguments.config_name = "qwen35_mimo"
    return arguments, arguments.overrides


def _config_folder(given: str | None) -> Path | None:
    # os.path: a home that is not known stays as it is written, and is no folder then.
    return None if given is None else Path(os.path.expanduser(given)).absolute()


def _taken(overrides: list[str], name: str) -> tuple[str | None, list[str]]:
    """(value of `name=...` among the overrides, the others)."""
    values = [text.split("=", 1)[1] for text in overrides if text.startswith(f"{name}=")]
    return (values[-1] if values else None), [text for text in overrides if not text.startswith(f"{name}=")]


def _drop_output() -> None:
    """Python must not try to write the rest when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(messages: list[str], code: int = 2) -> int:
    for message in messages:
        sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    return code
