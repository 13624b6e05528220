"""Tensor parallel plans from what one forward of a model does, and proofs that they are right."""

from recipe_lib.parallel.inference.certificate import Certificate, certify
from recipe_lib.parallel.inference.foreign import example_inputs, plan_for_config, transformers_model
from recipe_lib.parallel.inference.gradients import gradient_errors
from recipe_lib.parallel.inference.infer import infer_plan
from recipe_lib.parallel.inference.plan import Axis, Boundary, ParameterPlan, Rewrite, TensorPlan
from recipe_lib.parallel.inference.shrink import shrink

__all__ = [
    "Axis",
    "Boundary",
    "Certificate",
    "ParameterPlan",
    "Rewrite",
    "TensorPlan",
    "certify",
    "example_inputs",
    "gradient_errors",
    "infer_plan",
    "plan_for_config",
    "shrink",
    "transformers_model",
]
