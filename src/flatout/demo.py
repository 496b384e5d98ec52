"""`flatout demo`: hardware, plan, live training of a small decoder on the embedded corpus, and a text it writes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from flatout import gallery
from flatout.config import dump, load, to_mapping
from flatout.engine.trained import open_trained
from flatout.model import Decoder
from flatout.recipes import pretrain
from flatout.recipes.verdict import Outcome
from flatout.record import Run
from flatout.sample import complete
from flatout.terminal import View

PROMPT = "One morning"


def run(folder: Path, *, console: Console) -> Outcome:
    settings = load(gallery.find("pretrain-demo").path).settings
    outcome = pretrain.run(
        settings,
        folder=folder,
        config_text=dump(settings),
        config=to_mapping(settings),
        sinks=[View(console, every=settings.log.every)],
    )
    if outcome.stopped_by.startswith("SIG"):
        return outcome
    trained = open_trained(Run.open(folder))
    assert isinstance(trained.model, Decoder)
    text = complete(trained.model, trained.tokenizer, PROMPT, max_new_tokens=120, temperature=0.7, seed=settings.seed)
    console.print("\n[bold]It writes[/]")
    console.print(text, markup=False, highlight=False)
    console.print(f"\nRun folder: {folder}", markup=False, highlight=False)
    return outcome
