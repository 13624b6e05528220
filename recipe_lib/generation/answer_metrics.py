"""What is measured of an answer: `fn(prediction, reference) -> number`, averaged over all answers.

`exact_match` ships; a plugin registers its own by `register("metric", "name")`. prediction: the text that the model
gave; reference: that of the sample; both without the token that ends an answer.
"""

from recipe_lib.config.registry import register


@register("metric", "exact_match")
def exact_match(prediction: str, reference: str) -> float:
    """1 for the same text, letter for letter, else 0."""
    return float(prediction == reference)
