"""The faults of tests/mutations.py can be made in the code as it is now, one or more in each
package.
"""

from tests.house.files import ROOT
from tests.mutation_table import MUTATIONS
from tests.mutations import find_fault


def test_every_mutation_can_be_made():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 40
    assert not list(filter(None, map(find_fault, MUTATIONS)))


def test_every_package_has_one():
    packages = {path.parent.name for path in (ROOT / "recipe_lib").glob("*/__init__.py")}
    assert packages <= {mutation.path.split("/")[1] for mutation in MUTATIONS}
