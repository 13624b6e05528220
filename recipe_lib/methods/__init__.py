"""Implement the training methods other than plain fine-tuning: `dpo`, `reward`, `distill`.

Each folder has its recipe's config class (`config.py`, without torch), its loss and validation
(`loss.py`), and checks before a run; the recipe imports them. The rest of the library knows no
method by name: it asks the config class, which overrides `config.schema.RecipeFacts`. The config
classes of full fine-tuning and LoRA are in `config.schema`, their cross-entropy in `ops`.
"""
