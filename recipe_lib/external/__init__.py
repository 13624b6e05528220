"""Models of other libraries, trained in their own classes; and tensor-parallel plans that other trainers can apply."""

from recipe_lib.external.apply_plan import TensorPlan, infer_tensor_plan, seen_as_one_process

__all__ = ["TensorPlan", "infer_tensor_plan", "seen_as_one_process"]
