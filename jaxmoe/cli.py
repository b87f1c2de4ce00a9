"""The ``jaxmoe`` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from jaxmoe.errors import CacheError, KernelCompileError

# Name and what it does; the module of that name in jaxmoe.commands is imported only when it is run.
_COMMANDS = {
    "bench": "run a layer of random weights here: time beside its floor, memory beside its plan, where the time goes",
    "doctor": "say what is installed, what works here and what to install",
    "plan": "say what a layer will do on a GPU, also one that is not here: layout, kernels, memory, time at best",
    "warmup": "compile the GPU kernels of a layer ahead of time, for this GPU or another",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``jaxmoe`` with these arguments (None takes the process's) and returns its exit code.

    0: done. 1: it could not be done. 2: the arguments are wrong.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="jaxmoe", description="Mixture-of-Experts inference for JAX.")
    chosen = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    runs = {}
    for name, what in _COMMANDS.items():
        sub = chosen.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        if name in argv:
            module = importlib.import_module(f"jaxmoe.commands.{name}")
            module.add_arguments(sub)
            runs[name] = module.run
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    try:
        return runs[arguments.command](arguments)
    except (ValueError, NotImplementedError) as mistake:
        return _fail(arguments.command, mistake, 2)
    except (CacheError, KernelCompileError) as failure:
        return _fail(arguments.command, failure, 1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _fail(command: str, error: Exception, code: int) -> int:
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    print(f"jaxmoe {command}: {error}{notes}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
