"""From documents to batches: text is tokenized into verified shards, and a stream gives the batch of any step.

`prepare` writes the shards, `shards` reads them, `stream` makes the batch of a step, `feed` prepares it ahead of
time. `flatout data prepare` and every recipe use it.
"""
