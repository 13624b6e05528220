"""What a part decides is handed on as an argument: nothing is hung on a model, a parameter or an
optimizer.
"""

import ast
import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from tests.house.files import format_location, list_python_files, parse_tree

# What a variable that holds a module, a parameter or an optimizer is called.
HOLDERS = {
    "model", "module", "modules", "layer", "trunk", "decoder", "network", "reference",
    "linear", "mlp", "head", "lm_head", "embedding", "embed_tokens",
    "parameter", "weight", "piece", "bias", "optimizer",
}  # fmt: skip
TORCH = {name for one in (nn.Module(), nn.Linear(1, 1), nn.Embedding(1, 1), nn.Parameter(torch.zeros(1))) for name in
         dir(one)} | set(dir(torch.optim.SGD([torch.zeros(1)])))  # fmt: skip
ROOTS = {"Module", "Linear", "Embedding", "Parameter", "Optimizer", "Adam", "AdamW", "SGD"}
# What classes of transformers have, which a model of another library may be asked for.
TRANSFORMERS = {
    "config",
    "use_cache",
    "get_text_config",
    "get_decoder",
    "_can_record_outputs",
    "_init_weights",
    "_keys_to_ignore_on_load_unexpected",
    "base_model_prefix",
    "logits",
    "reset_parameters",
    "thinker",
}
# What modules of ours declare; asked for where their class is not to be imported: of the lower
# layers' modules.
DUCKS = {"adapter_tensors", "fill_weight"}
# A second forward method, which `register_fsdp_forward_method` takes by name; the file that sets it
# calls it.
FORWARDS = {"run_as_output"}
# The library knows recipes by name in tables of the config and in examples of commands.
NAMING = ("recipe_lib/config/", "recipe_lib/cli/")
NAMING += ("recipe_lib/methods/",)


def classes() -> Iterator[ast.ClassDef]:
    for path in list_python_files("recipe_lib"):
        yield from (node for node in ast.walk(parse_tree(path)) if isinstance(node, ast.ClassDef))


def declared() -> set[str]:
    """Attributes that the library's own modules, parameters and optimizers have by their
    classes.
    """
    found, names = set(ROOTS), -1
    every = list(classes())
    while names != len(found):  # those derived from derived ones
        names = len(found)
        found |= {one.name for one in every if {last_of(base) for base in one.bases} & found}
    attributes = set()
    for one in every:
        if one.name not in found:
            continue
        for node in ast.walk(one):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                attributes.add(node.target.id)
            elif isinstance(node, ast.FunctionDef):
                attributes.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                attributes |= {node.attr} if last_of(node.value) == "self" else set()
            elif isinstance(node, ast.Assign):
                attributes |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return attributes


def last_of(node: ast.expr) -> str:
    """`head` of `model.lm_head.head` and of `heads[0].head`; `modules` of `modules[name]`."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def wires(code: ast.AST, known: set[str]) -> Iterator[tuple[ast.expr, str]]:
    """Attributes that are set on, or looked for in, a module, parameter or optimizer, and that no
    class declares.
    """
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            holder, name = last_of(node.value), node.attr
            if ast.unparse(node.value).startswith("cfg."):  # a section of the config
                continue
        elif isinstance(node, ast.Call) and last_of(node.func) in ("setattr", "getattr", "hasattr"):
            if len(node.args) < 2 or not (
                isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str)
            ):
                continue
            holder, name = last_of(node.args[0]), node.args[1].value
        else:
            continue
        if holder.lstrip("_") in HOLDERS and name not in known:
            yield node, name


def found_in(paths: Iterable, known: set[str]) -> list[str]:
    found = []
    for path in paths:
        more = TRANSFORMERS if "external" in path.parts else set()
        found += [
            f"{format_location(path, node)}: {name}"
            for node, name in wires(parse_tree(path), known | more)
        ]
    return found


def test_nothing_is_hung_on_models_parameters_and_optimizers():
    assert (
        found_in(list_python_files("recipe_lib", "recipes"), TORCH | DUCKS | FORWARDS | declared())
        == []
    )


def test_a_wire_would_be_found():
    known = TORCH | DUCKS | FORWARDS | declared()
    for line in (
        "model.pipeline = 1", "getattr(model, 'replicas', None)", "hasattr(self._model, 'tensor_gradients')",
        "optimizer.place_state = 1", "setattr(parameter, 'is_copy', True)", "modules[name].is_output_head = True",
        "model.lm_head.summed_loss = 1", "x.weight.rows_of = 1",
    ):  # fmt: skip
        assert [name for _, name in wires(ast.parse(line), known)], line
    for line in (
        "model.forward = 1",
        "parameter.grad = None",
        "self.pipeline = 1",
        "head.weight = 1",
        "cfg.name = 1",
    ):
        assert not list(wires(ast.parse(line), known)), line


def test_no_part_of_the_library_asks_which_recipe_runs():
    for path in list_python_files("recipe_lib"):
        for node in ast.walk(parse_tree(path)):
            name = (
                node.id
                if isinstance(node, ast.Name)
                else node.attr
                if isinstance(node, ast.Attribute)
                else ""
            )
            text = (
                node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            )
            asks = re.search(r"(^|_)dpo(_|$)|Dpo", name) or text in (
                "dpo",
                "dpo_distributed",
                "lora_finetune_distributed",
            )
            assert not asks or format_location(path, node).startswith(NAMING), format_location(
                path, node
            )
