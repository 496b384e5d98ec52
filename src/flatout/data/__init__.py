"""From documents to batches: read and tokenize into verified shards, then a stream that any step can be asked of.

`prepare` writes the shards, `shards` reads them, `stream` makes the batch of a step, `feed` has it ready in
time. `flatout data prepare` and every recipe use it.
"""
