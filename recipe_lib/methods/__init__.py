"""Training methods other than plain fine-tuning, a folder each: `dpo`, `reward`, `distill`.

A folder has the config of its recipe (`config.py`, without torch), the loss and validation
(`loss.py`), and checks before a run. A recipe imports what it needs of its own method.

The rest of the library knows no method by name: it asks the recipe's config class, which overrides
properties of `config.schema.RecipeFacts`. Full fine-tuning and LoRA have no folder here: their
config classes are in `config.schema`, their loss is the cross-entropy of `ops`.
"""
