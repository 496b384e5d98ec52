# ruff: noqa: SIM905 (a list of words reads best as words)
"""The generated corpus that comes with the package: `source: embedded` needs no download and no license.

Small documents of ten kinds whose words agree with one another: a story keeps to its people and their
pronouns, a ledger of who holds what is answered truthfully, sums and conversions are right. A small model
can therefore learn spelling, then grammar, then keeping track. Used by `flatout demo` and the default data.

Only `random.Random.random()` is used, the one method whose sequence Python guarantees.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def documents(seed: int, megabytes: float) -> Iterator[str]:
    """Documents of unequal length, the same for the same seed, until `megabytes` million bytes are reached."""
    dice = Dice(seed)
    left = megabytes * 1e6
    while left > 0:
        text = dice.pick(KINDS)(dice)
        left -= len(text)  # the texts are ASCII
        yield text


class Dice:
    """Seeded choices."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items."""
        rest = list(items)
        return [rest.pop(int(self.random() * len(rest))) for _ in range(count)]

    def number(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return low + int(self.random() * (high - low + 1))


# -- words -------------------------------------------------------------------------------------------------

WOMEN = """Ada Alma Bea Clara Cora Dora Edith Ella Emma Esther Flora Freya Greta Hanna Hilda Ida Ines Iris Jana
Judith Kira Laura Lena Lina Lucia Maria Marta Mina Mira Nadia Nora Olga Petra Rosa Ruth Sara Selma Tessa Vera
Wilma""".split()
MEN = """Adam Anton Ben Boris Carl Conrad David Edgar Emil Erik Felix Frank Georg Gustav Hugo Igor Ivan Jakob
Jonas Karl Leo Lukas Marco Martin Milan Nils Oscar Otto Paul Peter Pavel Rolf Simon Stefan Theo Tom Victor
Walter Willem Yuri""".split()
PLACES = """market harbour library garden mill station school forest bridge workshop bakery orchard lighthouse
meadow stable chapel museum kitchen attic cellar post-office ferry windmill quarry vineyard""".split()
TOWNS = """Aldbrook Birkham Coldwater Dunmere Eastmoor Fenwick Grayling Hollow-End Kestrel-Bay Lindale Marrow
Northgate Oakhurst Pinner Quillan Redford Stonebeck Thornby Upwell Westerly""".split()
THINGS = """lantern basket kite map violin ladder umbrella letter clock teapot blanket compass hammer mirror notebook
pencil ribbon rope saddle scarf shovel spoon telescope trumpet wheelbarrow whistle book bucket button candle coin
key drum needle oar""".split()
COLOURS = "red blue green yellow white black brown grey orange silver golden purple".split()
LOOKS = """old new small large broken heavy light pretty plain dusty shiny narrow wide rusty warm cold curious
empty fine""".split()
MOODS = """happy tired proud worried calm hungry curious nervous cheerful quiet grateful lonely brave sleepy
patient surprised""".split()
BEASTS = "dog cat horse goat crow fox hen duck donkey rabbit mouse owl sheep cow goose hedgehog otter pig".split()
FOODS = "bread soup apples cheese pears honey porridge carrots plums eggs rice beans cake nuts potatoes".split()
SKIES = ("sunny", "rainy", "windy", "foggy", "cloudy", "snowy", "stormy", "mild", "bright", "frosty")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
PARTS = ("morning", "afternoon", "evening")
SEASONS = ("spring", "summer", "autumn", "winter")
TRADES = """baker carpenter farmer teacher sailor miller tailor gardener painter blacksmith postman doctor fisherman
librarian shepherd clockmaker""".split()
ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen""".split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


def words(number: int) -> str:
    """A number below 1000 in words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    rest = f" and {words(number % 100)}" if number % 100 else ""
    return f"{ONES[number // 100]} hundred{rest}"


def a(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" or phrase == "hour" else f"a {phrase}"


def listing(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def person(dice: Dice, *, but: Sequence[str] = ()) -> dict[str, str]:
    """A name with the pronouns that go with it."""
    woman = dice.random() < 0.5
    name = dice.pick([n for n in (WOMEN if woman else MEN) if n not in but])
    he, his, him = ("she", "her", "her") if woman else ("he", "his", "him")
    return {"N": name, "he": he, "his": his, "him": him, "He": he.capitalize(), "His": his.capitalize()}


# -- stories -----------------------------------------------------------------------------------------------

OPENINGS = (
    "{N} lived near the {place} in {town}.",
    "On a {sky} {part} in {month}, {N} went to the {place}.",
    "There was once {a_trade} named {N}, who worked at the {place} in {town}.",
    "Every {day}, {N} walked to the {place} with {his} {beast}.",
    "In {town} everybody knew {N}, the {trade}.",
    "It was a {sky} {day}, and {N} had nothing to do.",
    "When {N} was young, {he} lived beside the {place}.",
    "{N} had a secret: {he} was afraid of the {place}.",
)
WANTS = (
    "{He} had lost {his} {look} {thing}, and {he} wanted it back.",
    "{He} wished for nothing more than {a_look} {thing}.",
    "{His} {thing} was {look}, but {he} would not have given it away for gold.",
    "That {part}, {he} found {a_look} {thing} under a tree.",
    "An uncle had left {him} {a_colour} {thing}, and nobody knew what it was for.",
    "{He} carried {a_colour} {thing} wherever {he} went.",
    "Somebody had left {a_look} {thing} at {his} door.",
)
MIDDLES = (
    "{N} looked behind the {place}, but there was only {a_beast}.",
    'The {beast} looked at {him} as if to say, "Not today."',
    "{F} came by and asked {him} what {he} was doing.",
    '"Have you seen my {thing}?" {N} asked {F}.',
    '"I saw it at the {otherplace}," said {F}, "early in the {part}."',
    "So {N} and {F} walked to the {otherplace} together.",
    "On the way they ate {food} and talked about the {season}.",
    "The road was {look}, and soon {N} was {mood}.",
    "At the {otherplace} they met {a_trade} who sold {food}.",
    "{He} asked the {trade} about the {thing}, and the {trade} only smiled.",
    "{F} was {mood}, because {fhe} had never been so far from home.",
    "Then the wind came, and it grew {sky} and dark.",
    "They waited under a roof until the {part}.",
    "{N} gave {F} half of {his} {food}, and {F} thanked {him}.",
    "{A_colour} {beast} ran across the road, and both of them laughed.",
    "{N} counted {his} coins: there were {count} of them.",
    '"We should go home," said {F}. "It is getting late."',
    '"Not yet," said {N}. "I am not {mood} enough to stop."',
    "The {thing} was not in the {otherplace}, and it was not in the {place}.",
    "For a while neither of them said a word.",
    "{F} told {him} a story about {a_trade} and {a_beast}.",
    "{N} did not believe it, but {he} was {mood} all the same.",
    "They crossed the bridge, turned left, and saw the lights of {town}.",
    "{F} held the {thing} while {N} opened the door.",
)
ENDINGS = (
    "In the end the {thing} was in {his} own pocket.",
    "At last {F} found the {thing} in the {otherplace}, and {N} was {mood} again.",
    "{N} gave the {thing} to {F}, who kept it for many years.",
    "They carried the {thing} home and put it beside the window.",
    "From that day on, {N} and {F} were friends.",
    "{N} never told anyone where the {thing} had been.",
    "That night {N} slept well, and the {thing} stood beside {his} bed.",
)
MORALS = (
    "It is easier to look for something together.",
    "A friend who waits is worth more than {a_colour} {thing}.",
    "And that is why the people of {town} still speak of {N}.",
    "The next {day} it was {sky} again.",
    "Nobody in {town} has forgotten it.",
)


def scene(dice: Dice) -> dict[str, str]:
    hero = person(dice)
    friend = person(dice, but=[hero["N"]])
    place, other = dice.some(PLACES, 2)
    fixed = {"F": friend["N"], "fhe": friend["he"], "fhis": friend["his"], "place": place, "otherplace": other}
    return hero | fixed | {"town": dice.pick(TOWNS), "thing": dice.pick(THINGS)} | passing(dice)


def passing(dice: Dice) -> dict[str, str]:
    """The words of a scene that may change from sentence to sentence."""
    look, colour, trade, beast = dice.pick(LOOKS), dice.pick(COLOURS), dice.pick(TRADES), dice.pick(BEASTS)
    return {
        **{"look": look, "colour": colour, "trade": trade, "beast": beast},
        **{"a_look": a(look), "a_colour": a(colour), "a_trade": a(trade), "a_beast": a(beast)},
        **{"mood": dice.pick(MOODS), "food": dice.pick(FOODS), "sky": dice.pick(SKIES), "day": dice.pick(DAYS)},
        **{"part": dice.pick(PARTS), "season": dice.pick(SEASONS), "month": dice.pick(MONTHS)},
        **{"A_colour": a(colour).capitalize(), "count": words(dice.number(2, 40))},
    }


def story(dice: Dice) -> str:
    facts = scene(dice)
    # Squaring makes short stories common and long ones rare.
    length = 3 + int(60 * dice.random() ** 2)
    lines = [dice.pick(OPENINGS), dice.pick(WANTS)]
    while len(lines) < length:
        lines += dice.some(MIDDLES, min(length - len(lines), 12))
    lines += [dice.pick(ENDINGS), dice.pick(MORALS)]
    text = []
    for number, line in enumerate(lines):
        facts.update(passing(dice))
        text.append(line.format_map(facts))
        text.append("\n\n" if number % 8 == 7 else " ")
    return "".join(text).rstrip()


# -- keeping track -----------------------------------------------------------------------------------------


def ledger(dice: Dice) -> str:
    """Things change hands and places; the questions at the end have one right answer each."""
    people = [person(dice)]
    for _ in range(dice.number(1, 3)):
        people.append(person(dice, but=[p["N"] for p in people]))
    names = [p["N"] for p in people]
    things = dice.some(THINGS, dice.number(2, 4))
    holder = {thing: dice.pick(names) for thing in things}
    where = {name: dice.pick(PLACES) for name in names}
    text = [f"{name} is at the {place}." for name, place in where.items()]
    text += [f"{name} has the {thing}." for thing, name in holder.items()]
    for _ in range(dice.number(2, 14)):
        if dice.random() < 0.5:
            name, place = dice.pick(names), dice.pick(PLACES)
            if where[name] != place:
                text.append(dice.pick(("{} goes to the {}.", "{} walks to the {}.")).format(name, place))
                where[name] = place
        else:
            thing, taker = dice.pick(things), dice.pick(names)
            giver = holder[thing]
            if giver != taker:
                said = dice.pick(("{} gives the {} to {}.", "{} hands the {} over to {}."))
                text.append(said.format(giver, thing, taker))
                holder[thing] = taker
    for thing in things:
        text.append(f"Who has the {thing}? {holder[thing]} has the {thing}.")
        if dice.random() < 0.5:
            text.append(f"Where is the {thing}? It is with {holder[thing]}, at the {where[holder[thing]]}.")
    return "\n".join(text)


# -- talk, letters, diaries --------------------------------------------------------------------------------

EXCHANGES = (
    ("Good {part}, {F}. How are you?", "I am {mood}, thank you. And you?"),
    ("Have you been to the {place}?", "Not since {day}. It was too {sky}."),
    ("What is in your basket?", "Only {food}, and {a_look} {thing}."),
    ("May I borrow your {thing}?", "Of course, but bring it back by {day}."),
    ("Is that your {beast}?", "No, it belongs to the {trade}."),
    ("How many coins do you have?", "I have {count}. It is not enough for {a_colour} {thing}."),
    ("Where does the {trade} live?", "In {town}, beside the {otherplace}."),
    ("Do you like {food}?", "Yes, but only in {season}."),
    ("It is {sky} again.", "It is always {sky} in {month}."),
    ("I cannot find my {thing}.", "Then let us look for it at the {otherplace}."),
    ("Did you hear the {beast} last night?", "I did, and it made me {mood}."),
    ("Shall we meet on {day}?", "Let us meet in the {part}, at the {place}."),
)
FAREWELLS = (
    ("Goodbye, {F}.", "Goodbye, {N}. Until {day}."),
    ("I must go now.", "Then go well, and greet the {trade}."),
    ("Thank you for the {food}.", "You are welcome, {N}."),
)


def dialogue(dice: Dice) -> str:
    facts = scene(dice)
    turns = [*dice.some(EXCHANGES, dice.number(1, 9)), dice.pick(FAREWELLS)]
    text = []
    for question, answer in turns:
        facts.update(passing(dice))
        text.append(f"{facts['N']}: {question}\n{facts['F']}: {answer}".format_map(facts))
    return "\n".join(text)


LETTER_LINES = (
    "It has been {sky} here since {day}, and the {place} is closed.",
    "My {beast} is well, though it eats more {food} than it should.",
    "Do you remember the {colour} {thing} that we found at the {otherplace}?",
    "I have sold it to {a_trade} for {count} coins.",
    "The {trade} asks about you every {day}.",
    "I am {mood}, and I hope that you are not {mood}.",
    "In {month} I will travel to {town}, if the road is not too {look}.",
    "Please send me {a_look} {thing}, since mine is gone.",
    "With this letter you will find a bag of {food}.",
    "There is much to do at the {place} in {season}.",
    "Yesterday {a_beast} came into the kitchen and would not leave.",
)


def letter(dice: Dice) -> str:
    facts = scene(dice)
    body = []
    for line in dice.some(LETTER_LINES, dice.number(2, 9)):
        facts.update(passing(dice))
        body.append(line.format_map(facts))
    date = f"{facts['town']}, {dice.number(1, 28)} {facts['month']}"
    return f"{date}\n\nDear {facts['F']},\n\n{' '.join(body)}\n\nYours,\n{facts['N']}"


DIARY_LINES = (
    "Up early. The sky was {sky}.",
    "Bought {food} at the market for {count} coins.",
    "Repaired the {look} {thing}; it took the whole {part}.",
    "Saw {a_colour} {beast} near the {place}.",
    "{F} came in the {part} and was {mood}.",
    "Ate {food} and went to bed.",
    "Nothing of note.",
    "Walked to {town} and back.",
    "Wrote a letter to {F}.",
    "The {trade} owes me {count} coins.",
)


def diary(dice: Dice) -> str:
    """Days in their order, so that the next heading can be told from the one before."""
    facts = scene(dice)
    first, day = dice.number(0, 6), dice.number(1, 20)
    text = []
    for number in range(dice.number(2, 8)):
        facts.update(passing(dice))
        lines = [line.format_map(facts) for line in dice.some(DIARY_LINES, dice.number(1, 4))]
        text.append(f"{DAYS[(first + number) % 7]} {day + number}. {' '.join(lines)}")
    return "\n".join(text)


# -- notes and lists ---------------------------------------------------------------------------------------

TASKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "make tea",
        ("a kettle", "a cup", "tea leaves", "water"),
        (
            "Fill the kettle with water.",
            "Heat the water until it boils.",
            "Put the tea leaves into the cup.",
            "Pour the hot water over the leaves.",
            "Wait for {m} minutes.",
            "Take out the leaves and drink the tea slowly.",
        ),
    ),
    (
        "plant a tree",
        ("a young tree", "a shovel", "a bucket of water"),
        (
            "Choose {a_look} place that gets enough light.",
            "Dig a hole {n} inches deep.",
            "Set the tree into the hole.",
            "Fill the hole with earth.",
            "Press the earth down with your feet.",
            "Water the tree every {m} days.",
        ),
    ),
    (
        "mend a chair",
        ("glue", "a clamp", "a cloth"),
        (
            "Turn the chair over and find the loose leg.",
            "Clean the joint with the cloth.",
            "Put glue into the joint.",
            "Hold the leg in place with the clamp.",
            "Wait for {n} hours.",
            "Take off the clamp and test the chair.",
        ),
    ),
    (
        "bake bread",
        ("flour", "water", "salt", "yeast"),
        (
            "Mix the flour, the salt and the yeast.",
            "Add the water and knead the dough for {n} minutes.",
            "Cover the dough and let it rise.",
            "Shape the dough into {m} loaves.",
            "Bake the loaves until they are brown.",
            "Let the bread cool before you cut it.",
        ),
    ),
    (
        "paint a fence",
        ("a brush", "a pot of {colour} paint", "an old cloth"),
        (
            "Wait for a dry day.",
            "Brush the dust off the fence.",
            "Stir the {colour} paint for {m} minutes.",
            "Paint from the top to the bottom.",
            "Let the first coat dry for {n} hours.",
            "Paint the fence once more, and clean the brush.",
        ),
    ),
    (
        "find your way without a map",
        ("a compass", "a pencil", "some {food}"),
        (
            "Look for a high place and climb it.",
            "Find north with the compass.",
            "Choose a mark that you can see from far away.",
            "Walk towards the mark and count your steps.",
            "Rest after every {n} hundred steps.",
            "Write down each turn with the pencil.",
        ),
    ),
)


def how_to(dice: Dice) -> str:
    title, needed, steps = dice.pick(TASKS)
    facts = {"m": words(dice.number(2, 9)), "n": words(dice.number(10, 40))} | passing(dice)
    numbered = [f"{number}. {step}" for number, step in enumerate(steps, start=1)]
    text = f"How to {title}\n\nYou need {listing(needed)}.\n\n" + "\n".join(numbered)
    if dice.random() < 0.5:
        text += f"\n\nThe work has {words(len(steps))} steps. Do not begin it when you are {{mood}}."
    return text.format_map(facts)


def shopping(dice: Dice) -> str:
    """Prices that add up."""
    buyer = person(dice)
    items = dice.some(THINGS, dice.number(2, 12))
    total = 0
    lines = [f"Things {buyer['N']} bought in {dice.pick(TOWNS)}:", ""]
    for item in items:
        price = dice.number(1, 30)
        total += price
        lines.append(f"- {a(dice.pick(LOOKS))} {item}: {plural(price, 'coin')}")
    lines += ["", f"{buyer['He']} bought {words(len(items))} things and paid {total} coins in all."]
    purse = total + dice.number(1, 50)
    lines.append(f"{buyer['He']} had {purse} coins before, so {buyer['he']} has {plural(purse - total, 'coin')} left.")
    return "\n".join(lines)


# -- facts -------------------------------------------------------------------------------------------------


def sums(dice: Dice) -> str:
    lines = []
    for _ in range(2 + int(38 * dice.random() ** 2)):
        kind, x, y = dice.number(0, 5), dice.number(0, 99), dice.number(1, 99)
        if kind == 0:
            lines.append(f"{x} + {y} = {x + y}")
        elif kind == 1:
            lines.append(f"{x + y} - {y} = {x}")
        elif kind == 2:
            lines.append(f"{x % 13} times {y % 13} is {(x % 13) * (y % 13)}.")
        elif kind == 3:
            lines.append(f"{words(x).capitalize()} plus {words(y)} is {words(x + y)}.")
        elif kind == 4:
            lines.append(f"{x * y} divided by {y} is {x}.")
        else:
            relation = "equal to" if x == y else "less than" if x < y else "greater than"
            lines.append(f"Is {x} {relation} {y}? Yes, {x} is {relation} {y}.")
    return "Sums\n\nHere are some true sums to learn by heart.\n\n" + "\n".join(lines)


UNITS = (
    ("hour", "minute", 60),
    ("minute", "second", 60),
    ("day", "hour", 24),
    ("week", "day", 7),
    ("year", "month", 12),
    ("century", "year", 100),
    ("kilometre", "metre", 1000),
    ("metre", "centimetre", 100),
    ("centimetre", "millimetre", 10),
    ("kilogram", "gram", 1000),
    ("litre", "millilitre", 1000),
    ("yard", "inch", 36),
    ("mile", "yard", 1760),
    ("dozen", "piece", 12),
)


def many(count: int, unit: str) -> str:
    irregular = {"century": "centuries", "inch": "inches", "dozen": "dozen"}
    return f"{count} {unit}" if count == 1 else f"{count} {irregular.get(unit, unit + 's')}"


def conversions(dice: Dice) -> str:
    lines = []
    for _ in range(dice.number(2, 12)):
        large, small, factor = dice.pick(UNITS)
        count = dice.number(2, 20)
        form = dice.number(0, 2)
        if form == 0:
            lines.append(f"There are {many(factor, small)} in {a(large)}.")
            lines.append(f"So {many(count, large)} make {many(count * factor, small)}.")
        elif form == 1:
            lines.append(f"How long or how much is {many(count, large)}? It is {many(count * factor, small)}.")
        else:
            lines.append(f"{many(count * factor, small)} are the same as {many(count, large)}.")
    return "\n".join(lines)


KIND_OF: dict[str, tuple[str, ...]] = {
    "bird": ("crow", "hen", "duck", "owl", "goose", "sparrow", "swan"),
    "fish": ("salmon", "trout", "herring", "carp", "pike"),
    "tree": ("oak", "birch", "willow", "pine", "maple", "elm"),
    "fruit": ("apple", "pear", "plum", "cherry", "peach", "lemon"),
    "tool": ("hammer", "saw", "shovel", "chisel", "rake", "axe"),
    "instrument": ("violin", "trumpet", "drum", "flute", "harp"),
    "metal": ("iron", "copper", "silver", "gold", "tin", "lead"),
}
UNCOUNTED = KIND_OF["metal"]


def kinds(dice: Dice) -> str:
    lines = []
    for _ in range(4 + int(20 * dice.random() ** 2)):
        kind, other = dice.some(list(KIND_OF), 2)
        member = dice.pick(KIND_OF[kind])
        name = member if member in UNCOUNTED else a(member)
        if dice.random() < 0.5:
            lines.append(f"What is {name}? {name.capitalize()} is {a(kind)}.")
        else:
            lines.append(f"Is {name} {a(other)}? No, {name} is {a(kind)}, not {a(other)}.")
    return "\n".join(lines)


KINDS: tuple[Callable[[Dice], str], ...] = (
    *(story, story, story, ledger, ledger, dialogue, dialogue, letter, diary),
    *(how_to, shopping, sums, conversions, kinds),
)
