"""The cached sampler gives what the plain one gives: the same tokens, draws, log-probabilities and likelihoods."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.cost import ModelShape
from flatout.data.tokenizer import ByteTokenizer
from flatout.errors import UsageError
from flatout.kernels.uniform import uniform
from flatout.model import Decoder
from flatout.sample import Completion, Generator, Plain, Sampling, cache, logits_of
from flatout.sample.cache import Cache, Cached
from flatout.sample.draw import draw, row_key

TOKENIZER = ByteTokenizer()
WINDOW = 96


MODELS = [{}, {"kv_heads": 4}, {"kv_heads": 1, "qk_norm": True, "tied": True}, {"window": 11, "full_layers": 1}]


def made(**changes: object) -> Decoder:
    shape = {
        "layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48, "vocab": 272,
        "positions": WINDOW,
    }  # fmt: skip
    model = Decoder(ModelShape(**(shape | changes)))  # type: ignore[arg-type]
    model.initialise(3)
    with torch.no_grad():  # decided enough that two ways of summing choose alike, various enough to be a test
        model.embedding.mul_(4.0 if model.head is None else 12.0)
    return model


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return made(**request.param)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(256) for _ in range(length)] for length in lengths]


def plain(model: Decoder) -> Plain:
    return Plain(logits_of(model), TOKENIZER, window=WINDOW)


def by_place(completions: object) -> dict[tuple[int, int], Completion]:
    listed = list(completions)  # type: ignore[call-overload]
    found = {(c.prompt, c.sample): c for c in listed}
    assert len(found) == len(listed), "a completion came twice"
    return found


def same(ours: dict[tuple[int, int], Completion], theirs: dict[tuple[int, int], Completion]) -> None:
    assert ours.keys() == theirs.keys()
    for place, completion in ours.items():
        assert completion.ids == theirs[place].ids
        assert completion.status == theirs[place].status
        assert completion.logprobs == pytest.approx(theirs[place].logprobs, abs=1e-4)


def test_greedy_is_the_plain_samplers_token_for_token(model: Decoder) -> None:
    prompts = prompts_of([1, 17, 5, 64, 2, 30, 9, 66])
    sampling = Sampling(max_tokens=20)
    expected = by_place(plain(model).generate(prompts, sampling=sampling))
    assert len({c.ids for c in expected.values()}) > 1
    for rows in (1, 3, 32):
        same(by_place(Generator(model, TOKENIZER, rows=rows).generate(prompts, sampling=sampling)), expected)


def test_what_prompts_begin_with_is_read_once_and_changes_nothing(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    [shared] = prompts_of([40])
    prompts = [[*shared, *own] for own in prompts_of([1, 12, 3, 7], seed=4)]
    sampling = Sampling(max_tokens=12, temperature=0.6)
    expected = by_place(plain(model).generate(prompts, sampling=sampling, samples=2))
    inner, read = cache.logits_after, []
    monkeypatch.setattr(cache, "logits_after", lambda model, *rest: read.append(len(rest[0])) or inner(model, *rest))
    for rows in (1, 2, 32):
        read.clear()
        generator = Generator(model, TOKENIZER, rows=rows)
        same(by_place(generator.generate(prompts, sampling=sampling, samples=2)), expected)
        assert read[0] == 40
        assert max(read[1:]) <= 1 + 12 + 3 + 7


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draws_are_the_plain_samplers_whatever_the_batch(model: Decoder, top_p: float) -> None:
    prompts = prompts_of([4, 21, 8])
    sampling = Sampling(max_tokens=12, temperature=0.9, top_p=top_p, seed=5)
    expected = by_place(plain(model).generate(prompts, sampling=sampling, samples=3))
    assert len({c.ids for c in expected.values()}) > 6
    for rows in (1, 2, 4, 32):
        same(by_place(Generator(model, TOKENIZER, rows=rows).generate(prompts, sampling=sampling, samples=3)), expected)


def test_a_prompt_is_drawn_by_its_key_not_its_place() -> None:
    model, prompts = made(), prompts_of([6, 7, 8])
    sampling = Sampling(max_tokens=8, temperature=1.0)
    generator = Generator(model, TOKENIZER)
    all_ = by_place(generator.generate(prompts, sampling=sampling))
    one = by_place(generator.generate([prompts[2]], sampling=sampling, keys=[2]))
    assert one[0, 0].ids == all_[2, 0].ids
    assert by_place(generator.generate([prompts[2]], sampling=sampling))[0, 0].ids != all_[2, 0].ids


def test_further_samples_go_on_where_the_first_ended(model: Decoder) -> None:
    prompts = prompts_of([5, 12])
    sampling = Sampling(max_tokens=10, temperature=1.0)
    for sampler in (Generator(model, TOKENIZER), plain(model)):
        whole = by_place(sampler.generate(prompts, sampling=sampling, samples=4))
        parts = by_place(sampler.generate(prompts, sampling=sampling, samples=1))
        parts |= by_place(sampler.generate(prompts, sampling=sampling, samples=3, first=1))
        same(parts, whole)


def test_nothing_ends_a_completion_before_it_may() -> None:
    model, prompts = made(), prompts_of([3, 40, 11, 25], seed=1)
    stop = frozenset(range(0, 256, 3))
    free, held = (
        Sampling(max_tokens=20, temperature=1.0, stop_ids=stop, stop_texts=("a", "e"), min_tokens=least)
        for least in (0, 8)
    )
    short = by_place(Generator(model, TOKENIZER).generate(prompts, sampling=free, samples=4))
    assert min(len(c.ids) for c in short.values()) < 8
    ours = by_place(Generator(model, TOKENIZER).generate(prompts, sampling=held, samples=4))
    same(ours, by_place(plain(model).generate(prompts, sampling=held, samples=4)))
    assert min(len(c.ids) for c in ours.values()) >= 8
    assert any(c.status == "stopped" for c in ours.values())


def test_logprobs_are_those_of_a_full_forward(model: Decoder) -> None:
    [prompt] = prompts_of([13])
    [drawn] = Generator(model, TOKENIZER).generate([prompt], sampling=Sampling(max_tokens=15, temperature=0.7))
    ids = [*prompt, *drawn.ids]
    with torch.no_grad():
        logprobs = logits_of(model)(torch.tensor(ids[:-1])).log_softmax(-1)
    wanted = [float(logprobs[len(prompt) - 1 + at, token]) for at, token in enumerate(drawn.ids)]
    assert drawn.logprobs == pytest.approx(wanted, abs=1e-4)


def test_stop_tokens_end_a_completion_and_belong_to_it() -> None:
    model, prompts = made(), prompts_of([3, 40, 11, 25], seed=1)
    free = by_place(Generator(model, TOKENIZER).generate(prompts, sampling=Sampling(max_tokens=30)))
    stop = frozenset({free[0, 0].ids[4], free[2, 0].ids[9]})
    sampling = Sampling(max_tokens=30, stop_ids=stop)
    ours = by_place(Generator(model, TOKENIZER, rows=2).generate(prompts, sampling=sampling))
    same(ours, by_place(plain(model).generate(prompts, sampling=sampling)))
    assert ours[0, 0].ids[-1] in stop
    assert ours[0, 0].status == "stopped"
    assert not stop & set(ours[0, 0].ids[:-1])


def test_stop_texts_end_a_completion() -> None:
    model, [prompt] = made(), prompts_of([9])
    [free] = Generator(model, TOKENIZER).generate([prompt], sampling=Sampling(max_tokens=20))
    stop = TOKENIZER.decode(free.ids[6:8])
    [cut] = Generator(model, TOKENIZER).generate([prompt], sampling=Sampling(max_tokens=20, stop_texts=(stop,)))
    assert cut.status == "stopped"
    assert stop in TOKENIZER.decode(cut.ids)
    assert len(cut.ids) <= 8


def test_the_window_ends_a_completion_and_a_prompt_that_fills_it_gets_none() -> None:
    model = made()
    prompts = prompts_of([WINDOW - 3, WINDOW, WINDOW + 50, 0])
    ours = by_place(Generator(model, TOKENIZER).generate(prompts, sampling=Sampling(max_tokens=20)))
    assert (len(ours[0, 0].ids), ours[0, 0].status) == (3, "length")
    assert all(ours[i, 0].status == "too_long" and not ours[i, 0].ids for i in (1, 2, 3))


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(min_value=1, max_value=40), min_size=1, max_size=25),
    rows=st.integers(min_value=1, max_value=7),
    samples=st.integers(min_value=1, max_value=5),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
)
def test_no_prompt_is_lost_or_doubled(lengths: list[int], rows: int, samples: int, seed: int) -> None:
    sampling = Sampling(max_tokens=6, temperature=1.0, stop_ids=frozenset(range(0, 256, 7)), seed=seed)
    generator = Generator(made(layers=1), TOKENIZER, rows=rows)
    found = by_place(generator.generate(prompts_of(lengths), sampling=sampling, samples=samples))
    assert found.keys() == {(i, s) for i in range(len(lengths)) for s in range(samples)}


def test_hundreds_of_prompts_with_random_ends() -> None:
    chance = random.Random(7)
    prompts = prompts_of([chance.randrange(1, 30) for _ in range(300)], seed=3)
    sampling = Sampling(max_tokens=12, temperature=1.0, stop_ids=frozenset(range(0, 256, 9)))
    found = by_place(Generator(made(layers=1), TOKENIZER, rows=20).generate(prompts, sampling=sampling))
    assert found.keys() == {(i, 0) for i in range(300)}
    assert len({len(c.ids) for c in found.values()}) == 12
    assert {c.status for c in found.values()} == {"stopped", "length"}


def test_streaming_is_generating() -> None:
    model, [prompt] = made(), prompts_of([10])
    sampling = Sampling(max_tokens=16, temperature=0.8, seed=2)
    [whole] = Generator(model, TOKENIZER).generate([prompt], sampling=sampling)
    for sampler in (Generator(model, TOKENIZER), plain(model)):
        assert tuple(sampler.stream(prompt, sampling=sampling)) == whole.ids


def test_likelihoods_are_the_plain_samplers(model: Decoder) -> None:
    prompts = prompts_of([5, 33, 1, 20])
    choices = [prompts_of(lengths, seed=9) for lengths in ([1, 1, 1], [4, 1], [7, 2, 3, 9], [6])]
    items = list(zip(prompts, choices, strict=True))
    wanted = plain(model).likelihoods(items)
    assert Generator(model, TOKENIZER).likelihoods([]) == []
    for rows in (1, 5, 64):
        generator = Generator(model, TOKENIZER, rows=rows)
        for ours, theirs in zip(generator.likelihoods(items), wanted, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


def test_surprisals_are_the_plain_samplers(model: Decoder) -> None:
    sequences = prompts_of([2, 70, 31])
    ours = list(Generator(model, TOKENIZER).surprisals(sequences))
    theirs = list(plain(model).surprisals(sequences))
    assert [len(s) for s in ours] == [1, 69, 30]
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_a_cache_is_made_once_for_all_that_fits_it() -> None:
    generator = Generator(made(), TOKENIZER, rows=4)
    list(generator.generate(prompts_of([40] * 4), sampling=Sampling(max_tokens=10)))
    first = generator._cache
    list(generator.generate(prompts_of([3] * 9), sampling=Sampling(max_tokens=10)))
    assert generator._cache is first


def test_reading_in_parts_is_reading_at_once() -> None:
    model = made()
    [tokens] = prompts_of([30])
    ids = torch.tensor(tokens)

    def last(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return hidden[-1] @ weight.t()

    with torch.no_grad():
        cache = Cache.make(model.shape, rows=2, length=64, dtype=torch.float32, device=ids.device)
        for start, end in ((0, 7), (7, 8), (8, 30)):
            attend = Cached(cache, first=1, lengths=[end - start], starts=[start], block=16)
            found = model(ids[start:end], attend.positions_N, attend, last)
        torch.testing.assert_close(found, logits_of(model)(ids)[-1], atol=1e-4, rtol=1e-4)


# Draws


def test_draws_have_the_frequencies_of_the_softmax() -> None:
    logits = torch.tensor([2.0, 0.5, -1.0, 1.0, -3.0])
    count = 50_000
    keys = torch.tensor([row_key(1, prompt, 0) for prompt in range(count)])
    places = torch.zeros(count, dtype=torch.long)
    chances = uniform(keys, places)
    assert 0 <= float(chances.min()) < 0.001 < 0.999 < float(chances.max()) < 1
    for cut in ({}, {"top_p": 0.8}, {"top_k": 2}):
        sampling = Sampling(max_tokens=1, temperature=0.7, **cut)  # type: ignore[arg-type]
        drawn = draw(logits.expand(count, -1), chances, places, sampling)
        seen = torch.bincount(drawn, minlength=5).double()
        p = (logits.double() / 0.7).softmax(-1)
        if cut:
            p = torch.where(torch.tensor([True, False, False, True, False]), p, 0.0)
            p = p / p.sum()
            assert seen[p == 0].sum() == 0
        kept = p > 0
        chi_square = float(((seen[kept] - count * p[kept]) ** 2 / (count * p[kept])).sum())
        assert chi_square < 23.5  # 4 degrees of freedom, 1 in 10,000


def test_positions_samples_prompts_and_seeds_are_drawn_apart() -> None:
    chances = {
        float(uniform(torch.tensor([row_key(seed, prompt, sample)]), torch.tensor([position])))
        for seed in (0, 1, -1, 2**40)
        for prompt in (0, 1, 2)
        for sample in (0, 1, 2)
        for position in (0, 1, 2)
    }
    assert len(chances) == 4 * 27


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"max_tokens": 0}, "max tokens 0"), ({"temperature": -1.0}, "temperature -1"), ({"top_p": 0.0}, "top-p 0"),
     ({"top_p": 1.5}, "top-p 1.5"), ({"temperature": float("nan")}, "temperature nan"), ({"top_k": -1}, "top-k -1"),
     ({"min_tokens": 9}, "min tokens 9")],
)  # fmt: skip
def test_impossible_sampling_is_refused(settings: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Sampling(**({"max_tokens": 8} | settings))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_as_the_plain_sampler(dtype: torch.dtype) -> None:
    model = made(head_dim=64, hidden=256).cuda()
    model.compute_dtype = dtype
    prompts = prompts_of([1, 17, 5, 64, 2, 30])
    close = 1e-3 if dtype == torch.float32 else 1e-1
    for completion in Generator(model, TOKENIZER).generate(prompts, sampling=Sampling(max_tokens=20)):
        ids = [*prompts[completion.prompt], *completion.ids]
        forced = next(plain(model).surprisals([ids]))[-len(completion.ids) :]
        assert [-x for x in completion.logprobs] == pytest.approx(forced, abs=close)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"window": 11, "full_layers": 1}], ids=["full", "window"])
def test_on_a_gpu_common_prefixes_of_several_lengths(changes: dict[str, int]) -> None:
    """The recorded step of one call is used by the next, whose prompts share another number of tokens."""
    model = made(head_dim=64, hidden=256, **changes).cuda()
    model.compute_dtype = torch.float32
    sampler = Generator(model, TOKENIZER)
    for seed, shared in enumerate((24, 31, 24, 40)):
        [prefix] = prompts_of([shared], seed=seed)
        prompts = [[*prefix, *rest] for rest in prompts_of([3, 9, 5, 7], seed=100 + seed)]
        for completion in sampler.generate(prompts, sampling=Sampling(max_tokens=20), samples=3):
            ids = [*prompts[completion.prompt], *completion.ids]
            forced = next(plain(model).surprisals([ids]))[-len(completion.ids) :]
            assert [-x for x in completion.logprobs] == pytest.approx(forced, abs=1e-3)
