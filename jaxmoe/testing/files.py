"""Python files that are in no package, as modules."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def load_file(path: str | os.PathLike[str]) -> ModuleType:
    """The module of a Python file outside of any package, loaded once in a process.

    Raises:
      FileNotFoundError: there is no such file.
    """
    path = Path(path).resolve()
    name = f"jaxmoe_file_{path.parent.name}_{path.stem}"
    found = sys.modules.get(name)
    if found is not None and found.__file__ == str(path):
        return found
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
