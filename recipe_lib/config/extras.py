"""How packages that not every run needs are installed: from the index, by the ranges of pyproject.toml."""

import re
import shlex
from importlib import metadata

DISTRIBUTION = "tune-recipes"


def install_line(extra: str) -> str:
    """`pip install 'datasets<6,>=4' 'pyarrow>=17'`: what an extra of this project asks for, by package.

    An extra's own name (`tune-recipes[datasets]`) is no help where the project came from a clone or as a wheel.
    """
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a copy of the package that nobody installed
        return f"pip install {extra}"
    marked = [line.partition(";") for line in required]
    wanted = [package.strip() for package, _, marker in marked if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
    return f"pip install {shlex.join(wanted) if wanted else extra}"
