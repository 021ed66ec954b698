"""Importing this package declares every op: each module below without a leading underscore holds one."""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    if not _module.ispkg and not _module.name.rsplit(".", 1)[-1].startswith("_"):
        importlib.import_module(_module.name)
