"""Reading a config is quick and imports no torch."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 0.3  # seconds of CPU, the interpreter's start included

CODE = """
import resource, sys
from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.config.describe import describe_text
from recipe_lib.config.places import list_configs
from recipe_lib.errors import ConfigError
names = [name for names in list_configs().values() for name in names]
load_config("llama3/8B_full", ["batch_size=2"])
try:
    load_config("llama3/8B_full", ["bach_size=2", "lr=3", "optimizer.lr=x", "zzz=1"])
except ConfigError as error:
    assert len(error.faults) == 4
assert describe_text(FullFinetuneConfig)
heavy = {"torch", "numpy", "transformers", "huggingface_hub", "rich", "jinja2"} & set(sys.modules)
assert not heavy, heavy
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""


def test_cost():
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout))
    assert min(seconds) < LIMIT


def test_importing_the_package_brings_neither_yaml_nor_omegaconf():
    code = "import sys, recipe_lib.config; assert not {'torch', 'yaml', 'omegaconf'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
