"""Reading a config imports no torch, and little else; `python -m benchmarks.footprint` has the
seconds.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 300  # modules, the interpreter's own included; torch brings 900 more

CODE = """
import sys
from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.config.describe import format_terminal_reference
from recipe_lib.config.paths import list_configs
from recipe_lib.errors import ConfigError
names = [name for names in list_configs().values() for name in names]
load_config("llama3/8B_full", ["batch_size=2"])
try:
    load_config("llama3/8B_full", ["bach_size=2", "lr=3", "optimizer.lr=x", "zzz=1"])
except ConfigError as error:
    assert len(error.faults) == 4
assert format_terminal_reference(FullFinetuneConfig)
heavy = {"torch", "numpy", "transformers", "huggingface_hub", "rich", "jinja2"} & set(sys.modules)
assert not heavy, heavy
print(len(sys.modules))
"""


def test_cost():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < LIMIT


def test_importing_the_package_brings_no_omegaconf():
    code = "import sys, recipe_lib.config; assert not {'torch', 'omegaconf'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
