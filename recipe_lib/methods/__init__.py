"""Training methods, a folder each: the section of the config and the class of the recipe's config
(`config`, no torch), the loss, what is checked before a run, validation.

What the rest of the library has to know of a method it asks the config class
(`config.schema.RecipeFacts`). Full fine-tuning and LoRA are no methods: their config classes are
`config.schema`'s, their loss is cross-entropy.
"""
