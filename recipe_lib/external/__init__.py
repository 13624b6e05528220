"""Train, adapt and shard models that transformers, or a user's plugin, implements.

In comes a checkpoint's config.json and the class that it names. Out go a spec (`ModuleSpec`: its
tensors, adapters and pipeline stages), a model on meta with the class' own forward, and, for tensor
parallelism, a plan: inferred from one forward, proven on a small model, then run.

Read in this order:
1. module_spec.py: the spec that recipes build a model by, and all that it delegates to;
   checkpoint_layout.py: which tensors of files its parameters are made of.
2. build.py: how an object of the class becomes a model with our call signature.
3. tensor_plan/infer.py: from a traced forward (forward_trace.py) to a plan (sharding_plan.py).
4. proven_plan.py: the plan of a model; certificate.py: the proof that ranks run it right.
5. plan_executor.py: the class' forward as one rank runs it, with the plan's exchanges.
"""
