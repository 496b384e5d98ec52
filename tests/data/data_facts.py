"""The tokenizer that the test shards say they were made by."""

from flatout.data.shards import TokenizerFacts

FACTS = TokenizerFacts(name="byte", fingerprint="f" * 64, vocab_size=257, eos_id=256)
