"""Counts a script's tokens by hand: a line for each optimizer step, with the time and the real tokens so far."""

import json
import os
import time

_tokens = _step = 0


def saw(tokens):
    """Tokens that are not padding, of a forward pass that is trained on."""
    global _tokens
    _tokens += int(tokens)


def stepped(*_, **__):
    """An optimizer step is done."""
    global _step
    _step += 1
    if int(os.environ.get("RANK", "0")) == 0:
        with open(os.environ["COUNTED"], "a") as file:
            file.write(json.dumps({"step": _step, "time": time.time(), "tokens": _tokens}) + "\n")
