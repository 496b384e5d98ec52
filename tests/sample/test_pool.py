"""The fast store and its kernels give what the plain ones give: by Triton's interpreter on a CPU, natively on a GPU."""

from __future__ import annotations

import random
import weakref

import pytest
import torch

from flatout.cost import Adapters, ModelShape
from flatout.data.tokenizer import ByteTokenizer
from flatout.kernels import draw as draw_kernel
from flatout.model import Decoder, lora
from flatout.sample import Completion, Generator, Sampling
from flatout.sample.cache import Rows
from flatout.sample.pool import Pool, Ranges
from flatout.sample.state import State, TokenSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENIZER = ByteTokenizer()


def made(**changes: object) -> Decoder:
    shape = {
        "layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48, "vocab": 272,
        "positions": 96,
    }  # fmt: skip
    model = Decoder(ModelShape(**(shape | changes)))  # type: ignore[arg-type]
    model.initialise(3)
    with torch.no_grad():
        model.embedding.mul_(4.0 if model.head is None else 12.0)
    return model.requires_grad_(False).to(DEVICE)


def prompts_of(lengths: list[int], *, begin: int = 0) -> list[list[int]]:
    sampler = random.Random(1)
    start = [sampler.randrange(256) for _ in range(begin)]
    return [[*start, *(sampler.randrange(256) for _ in range(length))] for length in lengths]


def same(ours: list[Completion], theirs: list[Completion]) -> None:
    expected = {(c.prompt, c.sample): c for c in theirs}
    assert len(ours) == len(theirs) == len(expected)
    for completion in ours:
        other = expected[completion.prompt, completion.sample]
        assert completion.ids == other.ids
        assert completion.status == other.status
        assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def both(model: Decoder, prompts: list[list[int]], *, rows: int, samples: int, **asked: object) -> None:
    sampling = Sampling(**({"max_tokens": 4, "temperature": 0.9} | asked))  # type: ignore[arg-type]
    plain = list(Generator(model, TOKENIZER, kernels=False).generate(prompts, sampling=sampling, samples=samples))
    fast = Generator(model, TOKENIZER, kernels=True, rows=rows)
    same(list(fast.generate(prompts, sampling=sampling, samples=samples)), plain)


@pytest.mark.parametrize(
    ("changes", "begin"),
    [
        pytest.param({}, 0, marks=pytest.mark.long),
        ({"kv_heads": 1, "qk_norm": True, "tied": True}, 20),
        ({"layers": 2, "window": 6, "full_layers": 1}, 20),
        pytest.param({"kv_heads": 4}, 20, marks=pytest.mark.long),
    ],
)
def test_rows_that_share_prompts_and_beginnings_write_what_they_would_alone(
    changes: dict[str, object], begin: int
) -> None:
    both(made(**changes), prompts_of([3, 9, 1], begin=begin), rows=4, samples=2)


def test_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.sample.pool.READ_TOKENS", 7)
    both(made(), prompts_of([10, 2, 16], begin=18), rows=4, samples=1, max_tokens=2)


def test_a_window_may_begin_in_any_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the common prefix, in the prompt, among the generated tokens, and in a block after others."""
    monkeypatch.setattr("flatout.kernels.decode.BLOCK", 16)
    both(made(window=20), prompts_of([3, 30, 1], begin=24), rows=4, samples=2, max_tokens=26)


def test_rows_that_end_early_make_room_and_close_up() -> None:
    stops = frozenset(range(0, 256, 9))
    both(made(), prompts_of([2, 3, 4, 5]), rows=3, samples=2, max_tokens=5, stop_ids=stops, stop_texts=("a",))


def test_a_store_is_kept_for_what_fits_it() -> None:
    model, sampling = made(), Sampling(max_tokens=3)
    fast = Generator(model, TOKENIZER, kernels=True, rows=2)
    list(fast.generate(prompts_of([6, 7]), sampling=sampling))
    assert fast._running is not None
    store = fast._running.store
    again = list(fast.generate(prompts_of([5, 2, 4]), sampling=sampling))
    assert fast._running.store is store
    same(again, list(Generator(model, TOKENIZER, kernels=False).generate(prompts_of([5, 2, 4]), sampling=sampling)))


def test_many_samples_and_few_take_turns_in_one_store() -> None:
    model, sampling, prompts = made(kv_heads=1), Sampling(max_tokens=2, temperature=1.0), prompts_of([6, 7])
    fast = Generator(model, TOKENIZER, kernels=True, rows=12)
    plain = Generator(model, TOKENIZER, kernels=False)
    stores, layouts = set(), set()
    for samples in (6, 1, 6):
        ours = list(fast.generate(prompts, sampling=sampling, samples=samples))
        same(ours, list(plain.generate(prompts, sampling=sampling, samples=samples)))
        assert fast._running is not None
        stores.add(fast._running.store)
        layouts.add(fast._running.store.layout)
    assert (len(stores), len(layouts)) == (1, 2)


def test_a_store_that_is_too_small_is_gone_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Generator(made(), TOKENIZER, kernels=True, rows=2)
    list(fast.generate(prompts_of([6]), sampling=Sampling(max_tokens=1)))
    assert fast._running is not None
    old = weakref.ref(fast._running.store)
    make, seen = Pool.__init__, []

    def watched(*inputs: object, **more: int) -> None:
        seen.append(old())
        make(*inputs, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Pool, "__init__", watched)
    list(fast.generate(prompts_of([30]), sampling=Sampling(max_tokens=2)))
    assert seen == [None]


def test_a_row_is_read_wherever_its_tile_lies() -> None:
    """Four rows a tile: those of the first prompt fill two, and all but one of them leave."""
    model, prompts = made(kv_heads=1), prompts_of([5, 9])
    pool = Pool(model, rows=8, own=2, prompts=14, samples=7)
    assert pool.per_tile == 16
    pool.tile_for(4)
    pool.admit(prompts, [[0, 2, 3, 4, 5, 6, 7], [1]])
    pool.release([2, 3, 4, 5, 6, 7])
    token, position = torch.tensor([7, 8], device=DEVICE), torch.tensor([5, 9], device=DEVICE)
    found = pool.decode(token, position)
    alone = [Pool(model, rows=1, own=2, prompts=9, samples=1) for _ in prompts]
    for i, one in enumerate(alone):
        one.admit([prompts[i]], [[0]])
        torch.testing.assert_close(found[i], one.decode(token[i : i + 1], position[i : i + 1])[0])


def test_what_learns_is_read_as_it_is_now() -> None:
    model = made()
    lora.freeze(model, device=DEVICE, base_bits=16, seed=0)
    lora.attach(model, Adapters(rank=2, alpha=4.0, targets=("q", "v", "down")), seed=0)
    fast, plain = (Generator(model, TOKENIZER, kernels=kernels, rows=2) for kernels in (True, False))
    sampling, prompts, seen = Sampling(max_tokens=4), prompts_of([6, 3]), set()
    for step in range(2):
        with torch.no_grad():
            for _, b in lora.adapters(model).values():
                b.normal_(0.0, 1.0, generator=torch.Generator(device=DEVICE).manual_seed(step))
        ours = list(fast.generate(prompts, sampling=sampling))
        same(ours, list(plain.generate(prompts, sampling=sampling)))
        seen.add(tuple(c.ids for c in sorted(ours, key=lambda c: c.prompt)))
    assert len(seen) == 2


@pytest.mark.parametrize("where", ["_step", "_admit"])
def test_memory_that_runs_out_halves_the_rows(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts, sampling = made(), prompts_of([6, 3, 4, 9]), Sampling(max_tokens=6, temperature=1.0)
    expected = list(Generator(model, TOKENIZER, kernels=False).generate(prompts, sampling=sampling, samples=2))
    generator = Generator(model, TOKENIZER, kernels=False, rows=8)
    inner, place = (Rows.admit, "admit") if where == "_admit" else (Rows.decode, "decode")
    tried: list[int] = []

    def runs_out(store: Rows, *inputs: object) -> torch.Tensor:
        tried.append(store.rows)
        if store.rows > 2 and tried.count(store.rows) == (1 if where == "_admit" else 3):
            raise torch.OutOfMemoryError("no more")
        return inner(store, *inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(Rows, place, runs_out)
    same(list(generator.generate(prompts, sampling=sampling, samples=2)), expected)
    assert list(dict.fromkeys(tried)) == [8, 4, 2]


def test_free_ranges_are_joined_again() -> None:
    ranges = Ranges(10, 20)
    starts = [ranges.take(n) for n in (5, 5, 10)]
    assert starts == [10, 15, 20]
    assert ranges.take(1) is None
    for start, length in ((10, 5), (20, 10), (15, 5)):
        ranges.give(start, length)
    assert ranges.take(20) == 10


@pytest.mark.parametrize(
    "asked",
    [{}, {"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 5}, {"top_k": 20, "top_p": 0.6}, {"min_tokens": 1}],
    ids=str,
)
def test_draws_of_the_kernel_are_the_plain_ones(asked: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_kernel, "BLOCK", 64)
    rows, vocab, known, tokens = 3, 100, 90, 2
    stops = frozenset({5, 60, 80})
    sampling = Sampling(**({"max_tokens": tokens, "temperature": 0.8, "stop_ids": stops} | asked))  # type: ignore[arg-type]
    found = []
    for kernel in (False, True):
        state = State.make(rows=rows, tokens=tokens, device=DEVICE)
        state.begin(state.places, keys=[11, -7, 2**62], lengths=[5, 6, 7], limits=[tokens] * rows)
        state.end([1])
        sampler = TokenSampler.of(sampling, known=known, kernel=kernel, device=DEVICE)
        generator = torch.Generator().manual_seed(0)
        for _ in range(tokens):
            logits = (torch.randn(rows, vocab, generator=generator) * 2).bfloat16().to(DEVICE)
            sampler.advance(state, logits, state.places)
        found.append(state)
    plain, ours = found
    for name in ("token", "position", "count", "alive", "ids_RS"):
        assert torch.equal(getattr(plain, name), getattr(ours, name)), name
    torch.testing.assert_close(ours.logprobs_RS, plain.logprobs_RS, atol=1e-4, rtol=1e-4)
    assert plain.count.tolist()[1] == 0


@pytest.mark.gpu
def test_recorded_steps_are_the_plain_ones() -> None:
    """Many rows, refilled and closed up, of prompts that share a beginning; in fp32, so that draws agree."""
    model = made(layers=2, hidden=128, head_dim=32, positions=256)
    stops = frozenset(range(0, 256, 17))
    sampler = random.Random(5)
    prompts = prompts_of([sampler.randrange(1, 60) for _ in range(70)], begin=40)
    sampling = Sampling(max_tokens=40, temperature=1.0, stop_ids=stops, top_p=0.95)
    plain = list(Generator(model, TOKENIZER, kernels=False).generate(prompts, sampling=sampling, samples=4))
    fast = Generator(model, TOKENIZER, rows=64)
    for _ in range(2):  # the second time with what was recorded
        ours = list(fast.generate(prompts, sampling=sampling, samples=4))
        expected = {(c.prompt, c.sample): c for c in plain}
        assert {(c.prompt, c.sample) for c in ours} == expected.keys()
        # Sums in another order may turn a draw at its very edge.
        same = sum(c.ids == expected[c.prompt, c.sample].ids for c in ours)
        assert same >= 0.98 * len(ours)
    assert fast._running is not None
    assert fast._running.recorded
