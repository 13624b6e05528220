"""Tensor parallel plans from what one forward of a model does, and proofs that they are right."""

from recipe_lib.foreign.tensor_plan.certificate import Certificate, certify
from recipe_lib.foreign.tensor_plan.gradients import gradient_errors
from recipe_lib.foreign.tensor_plan.infer import infer_plan
from recipe_lib.foreign.tensor_plan.plan import Axis, Boundary, ParameterPlan, Rewrite, TensorPlan
from recipe_lib.foreign.tensor_plan.shrink import shrink
from recipe_lib.foreign.tensor_plan.transformers_models import example_inputs, plan_for_config, transformers_model

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
