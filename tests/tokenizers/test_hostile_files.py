"""Whatever stands in a tokenizer's files, it is a tokenizer that encodes or one line a fault."""

import json
import random
from pathlib import Path

from recipe_lib.errors import DataError
from recipe_lib.tokenizers import load_tokenizer
from tests.hostile import change_json
from tests.tokenizers.made import write_json

SEEDS = 250
EXTRA = {
    "special_tokens_map.json": {"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}},
    "added_tokens.json": {"<z>": 900},
    "generation_config.json": {"eos_token_id": [2, 3], "bos_token_id": 1},
}


def test_changed_files_encode_or_are_refused(tmp_path: Path):
    write_json(tmp_path)
    whole = {path.name: path.read_text() for path in tmp_path.glob("*.json")} | {
        name: json.dumps(content) for name, content in EXTRA.items()
    }
    refused = 0
    for seed in range(SEEDS):
        draw = random.Random(seed)
        for name, text in whole.items():
            (tmp_path / name).write_text(text)
        for name in draw.sample(sorted(whole), k=draw.choice((1, 1, 2))):
            (tmp_path / name).write_text(json.dumps(change_json(json.loads(whole[name]), draw)))
        try:
            load_tokenizer(tmp_path).encode(
                "Write 4072 in words. <|im_end|>\n é 漢", allow_special=True
            )
        except DataError as error:
            refused += 1
            assert all("\n" not in fault and len(fault) < 6000 for fault in error.faults), seed
    assert SEEDS / 10 < refused < SEEDS
