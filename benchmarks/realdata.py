"""Find real texts, tokenizers and weights for benchmarks: in the folder that REALDATA_DIR names.

None of them comes with the repository. docs/measurements/README.md says what the folder holds.
"""

import os
import sys
from pathlib import Path

VARIABLE = "REALDATA_DIR"  # of the environment


def find_real_data(name: str) -> Path:
    """Return the path of a file or folder in the folder that REALDATA_DIR names.

    Prints what is missing and raises SystemExit with code 2 if it is not there.
    """
    folder = os.environ.get(VARIABLE)
    if folder and (Path(folder) / name).exists():
        return Path(folder) / name
    fault = f"{VARIABLE}={folder}: has no {name}" if folder else f"{VARIABLE}: not set"
    print(
        f"error: {fault}, expected a folder with {name}; see docs/measurements/README.md",
        file=sys.stderr,
    )
    raise SystemExit(2)
