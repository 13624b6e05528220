"""`tune ls [RECIPE]`: the recipes, what each does, and the configs that are for it."""

import ast
from pathlib import Path

from recipe_lib.cli.arguments import Parser
from recipe_lib.config.paths import find_recipe, list_configs, list_recipes
from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import DONE, ConfigError


def run(words: list[str]) -> int:
    """Prints the table."""
    parser = Parser("ls", "Lists the recipes and the configs of each.")
    parser.add_argument("recipe", nargs="?", help="only this recipe")
    arguments = parser.parse(words)
    recipes = list_recipes()
    if arguments.recipe is not None:
        if arguments.recipe not in recipes:
            hint = did_you_mean(arguments.recipe, recipes) or f"; one of: {', '.join(recipes)}"
            raise ConfigError(f"{show(arguments.recipe)}: no such recipe{hint}")
        recipes = [arguments.recipe]
    configs = list_configs()
    for number, name in enumerate(recipes):
        if number:
            print()
        print(f"{name}: {first_line(find_recipe(name))}")
        for config in configs.get(name, []):
            print(f"  {config}")
    return DONE


def first_line(recipe: Path) -> str:
    """The first line of a recipe's docstring, read without running the file."""
    docstring = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or "no description"
    return docstring.splitlines()[0]
