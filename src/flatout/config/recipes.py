"""The table of recipes and their properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

RecipeName = Literal["pretrain", "sft", "dpo", "rft", "rl", "router"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`sections` are the configuration sections it uses in addition to those that all recipes use."""

    learns_from: Literal["running text", "rows", "samples", "rollouts", "solutions"]
    sections: tuple[str, ...] = ()
    compares: bool = False  # whether its rows have two answers, one preferred to the other

    @property
    def packs_documents(self) -> bool:
        """Rows and samples are always packed by document; data.packing applies to running text only."""
        return self.learns_from != "running text"

    @property
    def samples(self) -> bool:
        """Whether it trains on its own samples."""
        return self.learns_from == "samples"

    @property
    def rolls_out(self) -> bool:
        """Whether the weights that are being trained generate what they learn from."""
        return self.learns_from == "rollouts"

    @property
    def routes(self) -> bool:
        """Whether it trains an adapter for each of several tasks, on their worked solutions, and a router."""
        return self.learns_from == "solutions"

    @property
    def takes_adapters(self) -> bool:
        return "lora" in self.sections


RECIPES: Mapping[RecipeName, Recipe] = {
    "pretrain": Recipe(learns_from="running text"),
    "sft": Recipe(learns_from="rows", sections=("lora",)),
    "dpo": Recipe(learns_from="rows", sections=("lora", "dpo"), compares=True),
    "rft": Recipe(learns_from="samples", sections=("lora", "rft", "sample")),
    "rl": Recipe(learns_from="rollouts", sections=("lora", "rl", "mtl", "sample")),
    "router": Recipe(learns_from="solutions", sections=("lora", "router")),
}
# Sections that some recipes use and others do not.
OF_SOME = tuple(dict.fromkeys(section for recipe in RECIPES.values() for section in recipe.sections))


def recipes_that(do: Callable[[Recipe], bool]) -> str:
    """Their names, for messages."""
    return " or ".join(name for name, recipe in RECIPES.items() if do(recipe))
