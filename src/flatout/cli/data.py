"""`flatout data prepare` tokenizes documents into verified shards; `flatout data show` prints what a run trains on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flatout import limits
from flatout.cli.shared import (
    AsJson,
    Config,
    Overrides,
    file_path,
    load_settings,
    out,
    path_text,
    print_json,
    print_plain,
    require_torch,
)
from flatout.errors import FlatoutError, UsageError

app = typer.Typer(help="Prepare training data, and show it.", no_args_is_help=True)


@app.command()
def prepare(
    source: Annotated[
        str, typer.Argument(help="file, folder or glob; `embedded`; or hf:NAME", parser=path_text, metavar="SOURCE")
    ],
    to: Annotated[Path, typer.Option(help="folder to write the shards to", parser=file_path, metavar="PATH")],
    tokenizer: Annotated[
        str,
        typer.Option(help="byte, bpe:SIZE, a folder, a tokenizer.json or a hub name", parser=path_text, metavar="TEXT"),
    ] = "byte",
    field: Annotated[str, typer.Option(help="field that holds the text, in jsonl and parquet")] = "text",
    separator: Annotated[str, typer.Option(help="separator between documents, in text files")] = "<|endoftext|>",
    valid_share: Annotated[float, typer.Option(help="share of the documents held out")] = 0.01,
    valid_path: Annotated[
        str | None, typer.Option(help="separate validation files of the same kind", parser=path_text, metavar="PATH")
    ] = None,
    on_bad_row: Annotated[str, typer.Option(help="a row that cannot be read: skip and count it, or stop")] = "skip",
    max_bad_share: Annotated[float, typer.Option(help="stop when more than this share of rows is bad")] = 0.01,
    seed: Annotated[int, typer.Option(help="seed of the split", min=0, max=limits.SEED)] = 0,
    as_json: AsJson = False,
) -> None:
    """Tokenize documents once, into verified shards with a manifest of hashes and counts."""
    require_torch()
    from flatout.data.corpus import as_options, settings_for
    from flatout.data.prepare import describe, left_out
    from flatout.data.prepare import prepare as write_shards

    if not 0 < valid_share < 0.5:
        raise UsageError(f"--valid-share {valid_share:g} must be above 0 and below 0.5")
    if not 0 <= max_bad_share <= 1:
        raise UsageError(f"--max-bad-share {max_bad_share:g} must be from 0 to 1")
    if on_bad_row not in ("skip", "stop"):
        raise UsageError(f"--on-bad-row {on_bad_row!r} must be skip or stop")
    if not separator:
        raise UsageError("--separator must not be empty")
    try:
        settings = settings_for(
            source,
            tokenizer=tokenizer,
            field=field,
            separator=separator,
            valid_share=valid_share,
            valid_path=valid_path,
            on_bad_row=on_bad_row,
            max_bad_share=max_bad_share,
        )
        write_shards(settings, seed=seed, to=to)
        facts = describe(to)
    except FlatoutError as error:
        error.args = (as_options(str(error)),)
        raise
    if as_json:
        print_json(facts)
        return
    for part, counts in facts.items():
        out.print(
            f"{part}: {counts['tokens']:,} tokens in {counts['documents']:,} documents, {counts['shards']} shards"
        )
    if skipped := left_out(to):
        print_plain(f"left out: {skipped}")
    print_plain(f"train on it: data: {json.dumps({'source': 'tokens', 'path': str(to)})}")


@app.command()
def show(
    config: Config,
    overrides: Overrides = None,
    count: Annotated[
        int, typer.Option("-n", "--count", help="examples of each source to print", min=0, max=limits.ROWS)
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Show what a run trains on: rendered examples, lengths, packing, and what is left out."""
    require_torch()
    from dataclasses import asdict

    from flatout.recipes.showing import show as read

    found = read(load_settings(config, overrides, trust=None), count=count)
    if as_json:
        print_json(asdict(found))
        return
    for example in found.examples:
        head = f"{example.source}, example {example.label}: {example.tokens} tokens, {example.learnt} trained on"
        print_plain(head)
        for text, learnt in example.pieces:
            for line in text.splitlines() or [""]:
                print_plain(f"  {'>' if learnt else '|'} {line}")
    if found.examples:
        print_plain("lines with > are trained on\n")
    for source in found.sources:
        formats = ", ".join(f"{count:,} {name}" for name, count in source.formats.items())
        print_plain(
            f"{source.source}: {formats or 'no rows'}; {source.train_examples:,} to train on "
            f"({source.share:.1%} of an epoch), {source.valid_examples:,} held out"
        )
    lengths = ", ".join(f"{name} {tokens:,}" for name, tokens in found.lengths.items())
    print_plain(f"{found.train_tokens:,} tokens, {found.learnt_tokens:,} trained on; lengths: {lengths}")
    print_plain(f"packed into {found.sequences:,} sequences of {found.sequence_length:,}, {found.fill:.1%} full")
    print_plain(f"left out: {found.left_out or 'nothing'}")
