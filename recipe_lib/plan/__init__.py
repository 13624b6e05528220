"""Plan a run before it runs: its memory, communication and time.

In comes a recipe class, its config and `PlanSettings`: the device (`hardware.py`), the number of
ranks, the length of sequences. Out comes a `Plan` (`plan_schema.py`): dataclasses and JSON. The
recipe itself runs in between, on a device where tensors have sizes but no bytes. Read, in order:

1. `build_plan.py`: the way in; `make_plan` calls all the others.
2. `tracing/trace_rank.py`: runs the recipe for one rank, in the world of `simulated_world/`.
3. `allocation/caching_allocator.py`: turns its allocations into reserved memory.
4. `timing/stream_schedule.py`: turns its operators into seconds; `timing/cost.py` has each one's.
5. `summary/rank_memory.py`: decides whether it fits; the rest of `summary/` sums up the trace.

`views/` words and draws a plan, `search/` compares plans of changed configs, `measured/` has what
was measured on this machine, `streams/` checks the recipe for races.
"""
